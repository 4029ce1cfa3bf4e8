"""From a sealed version to live weights: follow, route, fetch, stage, drive the engine."""
