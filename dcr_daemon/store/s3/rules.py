"""Warnings about bucket rules that would damage a stream, where reading them is allowed (must L6).

Reading a bucket's configuration needs rights that a least-privilege publisher does not have; so a denied or
unimplemented call gives no warning, and never an error.
"""

from __future__ import annotations

from typing import Any

from dcr_daemon.store.s3.faults import SDK_ERRORS


async def versioning_warnings(client: Any, bucket: str) -> list[str]:
    """What versioning does to a stream, if the bucket has it."""
    try:
        status = (await client.get_bucket_versioning(Bucket=bucket)).get("Status")
    except SDK_ERRORS:
        return []
    if status is None:
        return []
    return [
        f"bucket {bucket}: versioning is {status}: retention will free no space without a rule that expires "
        "noncurrent versions, and a deleted ledger record could be created again"
    ]


async def lifecycle_warnings(client: Any, bucket: str, *, root: str) -> list[str]:
    """One sentence per enabled rule that may expire or move current objects below `root`."""
    try:
        rules = (await client.get_bucket_lifecycle_configuration(Bucket=bucket)).get("Rules", [])
    except SDK_ERRORS:
        return []
    warnings = []
    for rule in rules:
        harms = [name for name in ("Expiration", "Transitions", "Transition") if _harms(rule.get(name))]
        prefix = _prefix(rule)
        if rule.get("Status") == "Enabled" and harms and (prefix.startswith(root) or root.startswith(prefix)):
            warnings.append(
                f"bucket {bucket}: lifecycle rule {rule.get('ID') or prefix or 'without a name'!r} "
                f"({', '.join(harms).lower()}) covers {root}: the ledger must live for ever, exclude the stream from it"
            )
    return warnings


def _harms(part: Any) -> bool:
    """An `Expiration` that only clears delete markers touches no object."""
    return bool(part) and part != {"ExpiredObjectDeleteMarker": True}


def _prefix(rule: dict[str, Any]) -> str:
    place = rule.get("Filter") or {}
    return str(rule.get("Prefix") or place.get("Prefix") or (place.get("And") or {}).get("Prefix") or "")
