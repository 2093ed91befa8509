"""Random trainings equal plain torch's or are refused: a few of what ``benchmarks.fuzz_training`` runs by the thousand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from benchmarks.fuzz_training import plain, turns
from benchmarks.fuzz_training.__main__ import script, smaller
from benchmarks.fuzz_training.case import AFTER, CHOICES, Case, draw, from_choices, legal
from benchmarks.fuzz_training.compare import Outcome, judge
from benchmarks.fuzz_training.faults import FAULTS
from benchmarks.fuzz_training.plain import Look, Plain, Trained
from benchmarks.fuzz_training.pool import Answer, Pool

_FIELDS = {name: st.sampled_from(values) for name, values in CHOICES.items()}
CASES = st.builds(
    from_choices,
    after=st.lists(st.sampled_from(AFTER), max_size=2, unique=True).map(tuple),
    **{**_FIELDS, "ranks": st.sampled_from((2, 1)), "compiled": st.just("")},  # graphs take seconds each
    seed=st.integers(0, 10**6),
)

#: Cases that once went wrong, with the words of the refusal where one is right; empty where the numbers are to be equal.
FOUND = [
    # After a checkpoint had sent a delayed update, parameters that had been read since the step showed the values before it.
    (Case(loss="penalty-before", after=("save", "held"), ranks=2, stage=1, offload="cpu", delayed=1, seed=20011316), ""),
    # So did those that a call of the bare module had left open.
    (Case(loss="penalty-before", after=("save", "module-eval"), ranks=2, stage=2, accum=2, offload="cpu", delayed=1), ""),
    # The first rank alone refused an alias in the state dict, and the other waited for it.
    (
        Case(before_step="state", after=("caught",), alias="parameter", ranks=2, stage=3, seed=80010187),
        "is read while its unit",
    ),
    # A checkpoint of a model with an empty parameter was refused.
    (Case(odd=True, after=("save",), optimizer="asgd", steps=3, schedule="step", ranks=2, stage=3), ""),
    # An empty parameter kept its precision.
    (Case(odd=True, dtype="fp16", seed=188), ""),
    # `.data` was written to between forward and backward, and the master did not follow.
    (Case(within="data-write", stage=3, offload="half", seed=179), "has been changed since"),
    (Case(within="data-write", dtype="bf16", seed=61), "has been changed since"),
    (Case(loss="input-gradient", within="data-write", ranks=2, stage=2, dtype="bf16", seed=1501), "has been changed since"),
    # state_dict() after a step showed the parameters of before it.
    (Case(after=("state-dict",), ranks=2, stage=2, offload="cpu", seed=133), ""),
    # load_state_dict() rounded the masters of what it did not change.
    (Case(after=("load-state",), dtype="bf16", seed=174), ""),
    (Case(clamps="each", stage=2, ranks=2, dtype="bf16", steps=4, seed=5), ""),
    # A write before the backward undid an update that had begun in it.
    (Case(after=("write",), stage=1, offload="cpu", seed=1174), ""),
    (Case(clamps="root", stage=3, offload="cpu", seed=1217), ""),
    # What a forward at stage 3 wrote into its parameters was lost.
    (Case(clamps="each", ranks=2, stage=3, audit=0, seed=5), ""),
    # Gradients of gradients used another unit's parameters.
    (Case(depth=3, loss="gradient-penalty", ranks=2, stage=3, audit=0, seed=1158), "gradients of gradients would use"),
    # An alias that the forward had kept showed old values, or another unit's.
    (Case(after=("caught",), ranks=2, stage=1, groups=2, offload="cpu", seed=80), ""),
    (Case(depth=4, after=("caught",), ranks=2, stage=3, audit=0, seed=130), "the forward has kept a tensor that shares"),
    (Case(depth=4, checkpointing="plain", after=("caught",), ranks=2, stage=3, seed=130), "has kept a tensor"),
    (Case(container="none", checkpointing="plain", after=("caught",), ranks=2, stage=3, offload="cpu"), "has kept a tensor"),
    # The same of aliases that are taken later, and of values that are written by `.data` in later forwards.
    (Case(steps=4, after=("caught",), alias="view", late=True, ranks=2, stage=2, offload="cpu"), ""),
    (Case(steps=4, after=("caught",), alias="data", late=True, ranks=2, stage=1, offload="cpu"), ""),
    (Case(depth=3, after=("caught",), alias="view", late=True, ranks=2, stage=3), "is read while its unit"),
    (Case(depth=3, after=("caught",), alias="parameter", late=True, ranks=2, stage=3), "is read while its unit"),
    (Case(clamps="data", late=True, steps=3, ranks=2, stage=3, dtype="bf16"), ""),
    (Case(clamps="data", steps=3, ranks=2, stage=2, dtype="bf16", offload="cpu"), ""),
    # A checkpoint ended its second forward early, so that reads after the step no longer waited for the update on the host.
    (Case(checkpointing="plain", after=("write",), stage=2, clip=0.05, offload="cpu", seed=1024459), ""),
    (Case(checkpointing="plain", frozen="embed", after=("norm",), stage=1, clip=1e9, offload="cpu", seed=1022368), ""),
    # Several units in one reentrant checkpoint took each other's parameters in the backward.
    (Case(depth=1, width=12, checkpointing="reentrant", ranks=2, stage=3, direct=False, audit=0, seed=100478), ""),
    (Case(depth=1, width=12, checkpointing="reentrant", ranks=2, stage=3), ""),
    # The ranks' embeddings parted.
    (Case(clamps="max-norm", ranks=2, stage=1), "has max_norm"),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


def test_cases_that_once_went_wrong(ranks: Pool) -> None:
    for case, refusal in FOUND:
        outcome = judge(case, ranks)
        assert outcome.kind == ("refused" if refusal else "equal"), (case, outcome)
        assert refusal in outcome.reason, (case, outcome)


@pytest.mark.long
@settings(max_examples=30, derandomize=True, phases=(Phase.explicit, Phase.generate, Phase.shrink), database=None)
@example(case=Case(tied=True, checkpointing="plain", order="twice", stage=3, ranks=2, accum=2, clip=0.05, optimizer="adamw"))
@given(case=CASES)
def test_random_trainings(ranks: Pool, case: Case) -> None:
    outcome = judge(case, ranks)
    assert outcome.is_well, script(case, outcome)


def test_cases_follow_from_their_seeds() -> None:
    assert draw(7) == draw(7) != draw(8)
    assert all(legal(draw(seed)) == draw(seed) for seed in range(200))
    assert {draw(seed, (2, 3)).ranks for seed in range(50)} == {2, 3}
    assert len({name for seed in range(300) for name in draw(seed).after}) == len(AFTER)


class Lost:
    """Stands for ranks whose runtime loses a part of one gradient, in trainings with Adam."""

    def begin(self, case: Case) -> None:
        self._case = case

    def end(self) -> list[Answer]:
        made = plain.train(self._case)
        if self._case.optimizer == "adam":
            name, master = next(iter(made.masters.items()))
            made.masters[name] = made.start[name] + 0.75 * (master - made.start[name])
        mine = [Trained([seen], made.masters, made.state) for seen in made.seen]
        return [Answer("well", one) for one in mine]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_difference_is_found_and_made_small(dtype: str) -> None:
    pool = Lost()
    assert judge(Case(dtype=dtype, accum=2), pool) == Outcome("equal")  # type: ignore[arg-type]
    case = Case(depth=4, ranks=3, optimizer="adam", loss="retained", after=("ema",), dtype=dtype)
    outcome = judge(case, pool)  # type: ignore[arg-type]
    assert outcome.kind == "different"
    assert "master embed.weight" in outcome.reason
    small, found = smaller(case, outcome, pool)  # type: ignore[arg-type]
    assert small == Case(optimizer="adam")
    assert f"judge({small}, Pool())" in script(small, found)


def test_bounds_are_far_below_a_lost_gradient() -> None:
    assert max(plain.CHANGE.values()) < 0.02
    assert torch.finfo(torch.float32).eps < plain.CHANGE["fp32"] < 1e-4


#: Trainings in which each fault of the runtime moves something; some with one that is followed to a sign or a 16-bit step.
FAULTY = {
    "rate": (Case(ranks=2, stage=2), Case(optimizer="lion", ranks=2, stage=1), Case(dtype="bf16", after=("anew",), steps=3)),
    "clip": (Case(clip=0.05, ranks=2), Case(clip=0.05, optimizer="adamw", dtype="bf16", after=("anew",), ranks=2, stage=3)),
    "mean": (Case(ranks=2, stage=3), Case(optimizer="rprop", ranks=2, stage=2), Case(optimizer="lion", ranks=2, stage=1)),
    "element": (Case(ranks=2, stage=2), Case(optimizer="rprop", ranks=2, stage=2), Case(optimizer="lion", ranks=2, stage=1)),
    "micro": (Case(accum=2), Case(accum=3, optimizer="adamw", direct=False, ranks=2, stage=1)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_runtime_are_found(ranks: Pool, fault: str) -> None:
    for case in FAULTY[fault]:
        for ranks.fault, kind in (("", "equal"), (fault, "different")):
            try:
                assert judge(case, ranks).kind == kind, case
            finally:
                ranks.fault = ""


class Given:
    """Stands for ranks that answer what `made` returns."""

    def __init__(self, made: Trained) -> None:
        self._made = made

    def begin(self, case: Case) -> None:
        pass

    def end(self) -> list[Answer]:
        return [Answer("well", Trained([seen], self._made.masters, self._made.state)) for seen in self._made.seen]


def test_a_sign_that_rounding_decides_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch has a gradient of -3e-9 in one element, more or less as it rounds; the other side has 2e-9 there."""
    case, train = Case(optimizer="rprop", steps=3), plain.train

    def planted(
        case: Case, *, wider: bool = False, nudge: float = 1.0, look: Look | None = None, value: float = -3e-9
    ) -> Trained:
        step = iter(range(case.steps))

        def look_after(plain: Plain) -> None:
            if next(step) == 1:
                grad = plain.masters[1].grad
                assert grad is not None
                grad.view(-1)[3] = value * nudge
            if look is not None:
                look(plain)

        return train(case, wider=wider, nudge=nudge, look=look_after)

    for module in (plain, turns):
        monkeypatch.setattr(module, "train", planted)
    other = planted(case, value=2e-9)
    assert judge(case, Given(other)) == Outcome("equal", "but for a sign that rounding decides")  # type: ignore[arg-type]
    # A fault beside it, and another sign where rounding decides nothing, are found.
    name, master = next(iter(other.masters.items()))
    other.masters[name] = master + 0.25 * (master - other.start[name])
    assert judge(case, Given(other)).kind == "different"  # type: ignore[arg-type]

    def turn(plain: Plain) -> None:
        grad = plain.masters[1].grad
        assert grad is not None
        grad.view(-1)[grad.abs().argmax()] *= -1

    assert judge(case, Given(planted(case, value=2e-9, look=turn))).kind == "different"  # type: ignore[arg-type]


def test_a_16_bit_step_that_rounding_decides_is_allowed() -> None:
    """A new engine takes its masters from 16-bit parameters: those between two such values may be either, others not."""
    case = Case(dtype="bf16", after=("anew",), steps=2)

    def moved(in_doubt: bool) -> Outcome:
        made = plain.train(case)
        doubt, master = made.doubts["norm.weight"], made.masters["norm.weight"]
        step = doubt.max()
        assert 2**-9 < step < 2**-6
        master[((doubt > 0) == in_doubt).nonzero()[0]] += step
        made.state["norm.weight"].copy_(master)
        return judge(case, Given(made))  # type: ignore[arg-type]

    assert moved(True).kind == "equal"
    assert "master norm.weight" in moved(False).reason
