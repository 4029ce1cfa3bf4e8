"""Measure and limit the memory that a piece of code takes."""
