"""Agreement: every rank makes the same call, or every rank raises the same error.

Ranks that disagree about shapes, options or layout would read each other's bytes wrongly or wait
for ever, and so would the others when one rank alone refuses its arguments. So before a call each
rank says what it is about to do. The usual answer is one fixed-size record on the host, which no
device waits for: the largest and the smallest fingerprint of any rank, whether any rank refuses,
and whether any rank wants a gradient. Only when the record shows a difference do the ranks exchange
words, and all of them raise the same text, which names the rank.

What it cannot see ends by the group's timeout: a rank that makes no call, and one that skips its
backward.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from kda_cp.comm.collectives import SideGroup, connect

Claim = Mapping[str, str]
"""What one rank says of its call: for the name of each argument, a description of its value."""

# The kinds of error that the others raise as well; any other becomes a ValueError there.
_KINDS: Mapping[str, type[Exception]] = {
    kind.__name__: kind for kind in (NotImplementedError, TypeError)
}


@dataclass(frozen=True)
class Report:
    """One rank's claim in full, its error if it has one, and the machine it runs on."""

    claim: Claim
    kind: str | None
    text: str | None
    node: str


class Agreement:
    """The ranks of one group, as they compare their calls; `agreement_of` makes it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._side = SideGroup(group)
        connect(group)

    def check(self, claim: Claim, error: Exception | None, wants_gradient: bool) -> bool:
        """Raise the same error on every rank unless all claims are equal and nobody has an error.

        Collective, on the host. Returns whether any rank wants a gradient.
        """
        number = _fingerprint(claim)
        record = torch.tensor([number, -number, error is not None, wants_gradient], device="cpu")
        largest, smallest, refused, wanted = self._side.maximum(record).tolist()
        if refused or largest != -smallest:
            self.compare(claim, error)
        return bool(wanted)

    def compare(self, claim: Claim, error: Exception | None, node: str = "") -> list[Report]:
        """As `check`, but in words at once. Returns the reports of all ranks, which agree."""
        kind, text = (None, None) if error is None else (type(error).__name__, str(error))
        own = json.dumps(asdict(Report(claim, kind, text, node)))
        reports = [Report(**json.loads(report)) for report in self._side.gather(own)]
        found = find_disagreement(reports)
        if found is not None:
            raise found from error
        return reports


_agreements: WeakKeyDictionary[dist.ProcessGroup, Agreement] = WeakKeyDictionary()


def agreement_of(group: dist.ProcessGroup) -> Agreement:
    """The agreement of a group, made when the group first asks and kept as long as the group.

    The first call for a group is collective.
    """
    if group not in _agreements:
        _agreements[group] = Agreement(group)
    return _agreements[group]


def _fingerprint(claim: Claim) -> int:
    """A number of 56 bits that differs where claims do, the same in every process."""
    digest = hashlib.blake2b(json.dumps(claim, sort_keys=True).encode(), digest_size=7)
    return int.from_bytes(digest.digest(), "big")


def find_disagreement(reports: Sequence[Report]) -> Exception | None:
    """The error that all ranks raise, given the reports of all; None where they agree.

    An error of a rank comes first; then the first argument that differs. What most ranks have is
    taken to be right, of equals what the lowest rank has.
    """
    for report in reports:
        if report.text is not None:
            same = [r for r, other in enumerate(reports) if other.text == report.text]
            kind = _KINDS.get(report.kind or "", ValueError)
            return kind(f"{_ranks(same, len(reports))}: {report.text}")
    for name in {name: None for report in reports for name in report.claim}:
        values = [report.claim.get(name, "nothing") for report in reports]
        expected = Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != expected:
                agreed = [r for r, other in enumerate(values) if other == expected]
                return ValueError(
                    f"rank {rank}: {name}: expected {expected}, as on "
                    f"{_ranks(agreed, len(reports))}, got {value}"
                )
    return None


def _ranks(ranks: Sequence[int], size: int) -> str:
    if len(ranks) == size:
        return "every rank"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
