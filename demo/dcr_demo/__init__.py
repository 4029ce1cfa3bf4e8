"""A small world to show and test DCR in: real models, a real trainer, real servers, all on this machine.

Nothing here is needed to run DCR, and the wheel does not hold it. `make setup` puts `demo/` on the environment's path.
"""
