"""Runs in the EngineCore process, on its one thread: decides who may change the weights, and when.

Input: calls of the subscriber (`engine.messages`, through the endpoint). Output: answers. The workers are asked through
`worker_group`. From top to bottom: `hooks` (how this sits in EngineCore), `engine_core` (entry point), `attach`,
`coordinator` and `scrub` (the operations), `state` (what they share), `verify_sums` (pure comparison of sums).
"""
