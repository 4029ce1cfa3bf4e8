"""`dcr plan`: what a trainer's ranks can publish, predicted from a configuration, or as a stream's ranks agreed on."""

from __future__ import annotations

from dcr_daemon.cli.plan.projection import command

__all__ = ["command"]
