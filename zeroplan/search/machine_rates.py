"""The rates of a request's machine: the presets' for its GPUs and network, or those of a profile in their place."""

from __future__ import annotations

import os
from pathlib import Path

from zeroplan.core.cluster import Cluster
from zeroplan.core.rates import Rates, profile_path, rates_of, read_profile


def machine_rates(cluster: Cluster, profile: str | os.PathLike[str] | None, warnings: list[str]) -> Rates:
    """Return the rates of a cluster, and add to `warnings` what is assumed of them.

    A profile that is named counts for any cluster, the user's own (``zeroplan doctor --calibrate``) for clusters of its GPU. A
    network that is named counts for more than a profile's, which was measured on another.

    Raises:
        BadInput: a profile that cannot be read, or holds something else than rates.
    """
    rates = rates_of(cluster.gpu, cluster.network, cluster.gpus)
    if cluster.gpu.capability == (0, 0) and cluster.layout.world_size > 1:
        warnings.append(f"{cluster.gpu.name} sends by RCCL, whose tuning is not known here: collectives are taken to be NCCL's")
    path = Path(profile) if profile is not None else profile_path()
    measured: dict[str, float] = {}
    if profile is not None or path.exists():
        found = read_profile(path)
        if profile is not None or found.get("gpu") == cluster.gpu.name:
            measured = dict(found["rates"])
            source = f"rates from {path}"
            together = found.get("together")
            if cluster.gpus > 1 and isinstance(together, dict) and isinstance(together.get("rates"), dict):
                measured |= together["rates"]
                source += f", the host's with {together.get('ranks')} processes at once"
            elif cluster.gpus > 1:
                source += ", the host's with one process: with more it is slower, calibrate where they run"
            warnings.append(source)
    if cluster.network is not None:
        measured = {name: rate for name, rate in measured.items() if name not in _BETWEEN_NODES}
    elif cluster.nodes > 1 and not measured.keys() & _BETWEEN_NODES:
        links = cluster.links
        what = f"{links.adapters} × {links.gigabits:g} Gb/s of {links.fabric}"
        warnings.append(f"each node is taken to have {what} ({links.source}); --network says otherwise")
    return rates.with_profile(measured, str(path)) if measured else rates


_BETWEEN_NODES = {"adapter_gbs", "ring_gbs", "network_us"}
