"""The demo, and parts of the end-to-end tests: small real models, a trainer, and real server processes on this machine.

Nothing here is needed to run DCR, and the wheel does not hold it. `make setup` puts `demo/` on the environment's path.
"""
