"""Scenarios of streams that stall in the middle of a body, with the S3 store of production code."""

from __future__ import annotations

from functools import partial

from sim.s3 import Stalls, open_stalling_store
from sim.scenario_run import ScenarioRun, scenario
from sim.scenarios import SUBSCRIBER

from dcr_daemon.errors import DcrError


@scenario()
async def stalled_streams(run: ScenarioRun) -> None:
    """Every connection brings only a third of some objects, and then stalls; the first upload of others stalls, too.
    All of it arrives while that lasts, and nobody ends because of it."""
    rng, world = run.rng, run.world
    stalls = Stalls(world, down=rng.choice((0.1, 0.3)), up=rng.choice((0.0, 0.2)))
    world.store = partial(open_stalling_store, world, stalls)
    if run.chance(0.5):
        run.hit("sub1", SUBSCRIBER, ("kill",), 5)
    publisher = run.publisher(updates=4, pause=5.0, anchor_every=rng.choice((1, 2, None)), patience=120.0)
    replica = run.replica(1, directory=run.chance(0.5))
    await run.until(lambda: publisher.left <= 0, 900.0, "published although streams stall")
    await run.until(lambda: run.served(replica) == run.watch.head, 900.0, "served although streams stall")
    if ended := [error for actor in (publisher, replica) for error in actor.exits if isinstance(error, DcrError)]:
        world.fail("stalled", f"somebody ended because streams stall: {ended}")
    await run.finish()
