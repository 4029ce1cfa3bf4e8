"""Which rank of how many a publisher is, where nobody says it in so many words."""

from __future__ import annotations

import pytest

from dcr_daemon.errors import UsageError
from dcr_daemon.publish.rank import find_rank


def test_processes_of_one_launcher_never_believe_that_each_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publisher made before `torch.distributed` is: four of them would claim one stream from each other."""
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as refused:
        find_rank(None, None, None)
    assert "initialise torch.distributed before" in refused.value.hint
    assert "rank=0, world=1" in refused.value.hint
    alone = find_rank(None, 0, 1)
    assert (alone.number, alone.world) == (0, 1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    found = find_rank(None, None, None)
    assert (found.number, found.world) == (2, 4)
    monkeypatch.setenv("RANK", "3")
    assert find_rank(None, None, None).group == found.group


@pytest.mark.parametrize("half", [{"RANK": "2"}, {"WORLD_SIZE": "4"}, {"RANK": "", "WORLD_SIZE": "4"}])
def test_half_of_what_a_launcher_says_is_nothing(monkeypatch: pytest.MonkeyPatch, half: dict[str, str]) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in half.items():
        monkeypatch.setenv(name, value)
    assert find_rank(None, None, None).world == 1
