"""`dcr verify`: read a stream as a sceptic."""

from __future__ import annotations

from dcr_daemon.cli.options import EndpointUrl, Json, Profile, Region, StoreOptions, StreamArgument


def command(
    stream: StreamArgument,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    profile: Profile = None,
    json: Json = False,
) -> None:
    """Check every record, object, digest and fingerprint of a stream."""
    StoreOptions(stream, endpoint_url, region, profile)
