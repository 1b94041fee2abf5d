"""The table of peers, and which of them are installed."""

from __future__ import annotations

from regard.bench.peer import Peer
from regard.bench.peers_huggingface import HUGGINGFACE_PEERS
from regard.bench.peers_kernels import KERNEL_PEERS
from regard.bench.peers_packages import PACKAGE_PEERS
from regard.spec import Spec
from regard.text import unknown

PEERS: tuple[Peer, ...] = (*KERNEL_PEERS, *PACKAGE_PEERS, *HUGGINGFACE_PEERS)
FULL = "SDPA"  # the baseline of every mechanism
ALL_PEERS, NO_PEERS = "all", "none"


def peer_names() -> list[str]:
    """The names of all peers, each once."""
    return list(dict.fromkeys(peer.name for peer in PEERS))


def chosen_peers(text: str) -> list[str]:
    """Names of peers from `all`, `none` or a list with commas; refuses a name that is no peer's."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if names == [ALL_PEERS]:
        return peer_names()
    if names == [NO_PEERS]:
        return []
    known = {name.lower(): name for name in peer_names()}
    for name in names:
        if name.lower() not in known:
            raise ValueError(unknown("there is no peer", name, [*known.values(), ALL_PEERS, NO_PEERS]))
    return [known[name.lower()] for name in names]


def peers_of(spec: Spec, causal: bool, names: list[str]) -> list[Peer]:
    """The chosen peers that are for a mechanism in its causal or bidirectional form."""
    return [peer for peer in PEERS if peer.name in names and peer.fits(spec, causal)]


def installed(names: list[str], device: str) -> dict[str, str]:
    """For each peer the version of its package, or why it cannot be measured here."""
    first = {peer.name: peer for peer in reversed(PEERS)}
    found = {}
    for name in names:
        peer = first[name]
        found[name] = peer.missing(device) or f"{peer.install} {peer.version()}"
    return found
