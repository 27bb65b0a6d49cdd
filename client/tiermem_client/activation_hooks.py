"""What `attach` does about activations: who offloads, who recomputes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from tiermem.errors import InvalidArgument, Unsupported
from tiermem.units import format_size
from tiermem_client.activation_policy import Policy
from tiermem_client.activation_slots import ActivationSlots
from tiermem_client.activations import MIN_BYTES, Activations, ActivationStats
from tiermem_client.memory import Bundle
from tiermem_client.recompute import Recomputed, can_recompute, compiled_refusal
from tiermem_client.residency import Residency
from tiermem_client.storage_swap import storage_key
from tiermem_client.unit_hooks import UnitHooks
from tiermem_client.units import Unit


def check_policies(policies: Mapping[str, Policy], named: Iterable[str], units: Sequence[Unit], device: str) -> None:
    """Refuse what cannot be: `named` are the units that the script names by their whole names, `device` is attach's."""
    if device and Policy.OFFLOAD in policies.values():
        raise Unsupported(
            f"activations are offloaded from host memory only, and device={device!r} computes elsewhere; recompute them"
        )
    modules = [module for unit in units for module in unit.modules]
    named = set(named)
    for unit in units:
        if policies[unit.name] is not Policy.RECOMPUTE:
            continue
        if unit.name in named and not any(can_recompute(module, modules) for module in unit.modules):
            raise InvalidArgument(
                f"activations of {unit.name!r} are to be recomputed, but it has nothing inside, or other units; "
                "name the units inside, or keep or offload its activations"
            )
        if refusal := compiled_refusal(unit):
            raise Unsupported(refusal)


def saves_memory(policies: Mapping[str, Policy]) -> bool:
    """Whether large blocks come and go that are not to stay in malloc's heap."""
    return any(policy is not Policy.KEEP for policy in policies.values())


def new_activations(
    model: nn.Module,
    residency: Residency,
    floor: Iterable[Bundle],
    policies: Mapping[str, Policy],
    on_kept: Callable[[str], None],
    on_pressure: Callable[[], None],
) -> Activations | None:
    """What offloads; None where nothing is to be. Beside the floor there is always room for one of its bundles."""
    if Policy.OFFLOAD not in policies.values():
        return None
    frame_bytes = residency.memory.frame_bytes
    taken = sum(residency.room_for(bundle) for bundle in floor)
    left = residency.session.frames * frame_bytes - taken
    bundle_bytes = min(residency.memory.bundle_cap_bytes, left) // frame_bytes * frame_bytes
    if bundle_bytes == 0:
        need = format_size(taken + max(frame_bytes, MIN_BYTES))
        on_kept(f"activations: kept in memory (offloading them needs {need} of DRAM or more)")
        return None
    return Activations(
        ActivationSlots(residency, bundle_bytes),
        policies,
        lambda: {key for buffer in model.buffers() if (key := storage_key(buffer)) is not None},
        on_kept,
        on_pressure,
    )


def recompute_units(
    hooks: UnitHooks,
    units: Sequence[Unit],
    policies: Mapping[str, Policy],
    stats: ActivationStats,
    on_kept: Callable[[str], None],
) -> Callable[[], None]:
    """Units whose policy it is run again in backward; returns the undo. `on_kept` is told once why one does not."""
    told: list[str] = []

    def tell(text: str) -> None:
        if not told:  # a session takes few notices
            told.append(text)
            on_kept(text)

    modules = [module for unit in units for module in unit.modules]
    undos = [
        Recomputed(hooks, unit, module, stats, tell).install()
        for unit in units
        if policies[unit.name] is Policy.RECOMPUTE
        for module in unit.modules
        if can_recompute(module, modules)
    ]

    def undo() -> None:
        for restore in reversed(undos):
            restore()

    return undo
