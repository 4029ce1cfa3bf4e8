"""A small world to show and test DCR in: real models, a real trainer, real servers, all on this machine.

Nothing here is needed to run DCR; it is installed with the `demo` extra.
"""
