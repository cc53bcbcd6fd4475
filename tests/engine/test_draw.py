"""Tokens and prompt logprobs of logits that come a slice at a time are those of all at once."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import _native
from octavo.engine.draw import Drawn, draw
from octavo.executor.base import Float32, StepResult
from octavo.sampling.native import NativeSampler
from octavo.sampling.params import SamplingParams
from octavo.sampling.sampler import SamplerState
from octavo.scheduler.batching import Branch, PromptRows, Scheduled
from octavo.tools.verify.chi_square import chi_square

VOCAB = 23


class Sequence:
    """What `draw` reads of one: its prompt, and how many alternatives it wants."""

    def __init__(self, prompt: list[int], top: int) -> None:
        params = SimpleNamespace(prompt_logprobs=top)
        self.token_ids = prompt
        self.owner = SimpleNamespace(params=params)


def sliced(logits: Float32, rows: int) -> StepResult:
    return StepResult(logits[:rows], 0.0, lambda first: logits[first : first + rows])


@pytest.fixture(scope="module")
def sampler() -> NativeSampler:
    return NativeSampler(VOCAB, "", _native.ThreadPool(1))


@given(st.data())
def test_slices_give_what_all_rows_give(sampler: NativeSampler, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    total = data.draw(st.integers(1, 40), label="rows of logits")
    logits = rng.standard_normal((total, VOCAB)).astype(np.float32)
    for row in data.draw(st.sets(st.integers(0, total - 1), max_size=3), label="not numbers"):
        logits[row, rng.integers(VOCAB)] = np.nan
    row_of = st.integers(0, total - 1)
    sample_rows = sorted(data.draw(st.lists(row_of, max_size=12), label="rows drawn from"))
    cuts = sorted(data.draw(st.sets(st.integers(0, total), max_size=6), label="prompts' rows"))
    spans = []
    for row, end in zip(cuts[::2], cuts[1::2], strict=False):
        prompt = rng.integers(0, VOCAB, 60).tolist()
        spans.append(
            PromptRows(cast(Any, Sequence(prompt, int(rng.integers(4)))), row, 7, end - row)
        )
    batch = SimpleNamespace(logits_rows=np.arange(total))
    scheduled = Scheduled(cast(Any, batch), [], [], [], sample_rows, spans)
    params = [
        SamplingParams(seed=index, logprobs=2 if rng.random() < 0.5 else None).validated(VOCAB)
        for index in range(len(sample_rows))
    ]

    def states() -> list[SamplerState]:
        return [sampler.new_state(each, [1, 2], set(), 0) for each in params]

    def tokens(drawn: Drawn) -> tuple[Any, ...]:
        none = [[None] * len(run) for run in drawn.runs]
        return drawn.runs, drawn.logprobs or none, drawn.errors

    expected = draw(sampler, scheduled, states(), StepResult(logits, 0.0))
    scores = expected.scores
    assert all(isinstance(score, str) or len(score) == span.size for span, score in scores.items())
    rows = data.draw(st.integers(1, total), label="rows held")
    got = draw(sampler, scheduled, states(), sliced(logits, rows))
    got_scores = got.scores
    assert tokens(got) == tokens(expected)
    assert got_scores.keys() == scores.keys()
    for span, score in scores.items():
        if isinstance(score, str):
            assert isinstance(got_scores[span], str)
        else:
            assert got_scores[span] == score


@given(st.data())
def test_slices_give_what_all_rows_give_of_drafts(
    sampler: NativeSampler, data: st.DataObject
) -> None:
    """By either rule; and what stands is what the states have recorded."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    rejection = data.draw(st.booleans(), label="rejection")
    drafts = [
        rng.integers(0, 3, data.draw(st.integers(0, 5), label="draft")).tolist()
        for _ in range(data.draw(st.integers(1, 6), label="decodes"))
    ]
    others = data.draw(st.integers(0, 3), label="that only draw")
    sizes = [1 + len(draft) for draft in drafts] + [1] * others
    first_rows = np.cumsum([0, *sizes])
    total = int(first_rows[-1])
    logits = rng.standard_normal((total, VOCAB)).astype(np.float32)
    logits[:, :3] += 3
    for row in data.draw(st.sets(st.integers(0, total - 1), max_size=2), label="not numbers"):
        logits[row, rng.integers(VOCAB)] = np.nan
    given = [
        rng.dirichlet(np.ones(VOCAB), len(draft)).astype(np.float32) if rng.random() < 0.6 else None
        for draft in drafts
    ]
    batch = SimpleNamespace(logits_rows=np.arange(total))
    scheduled = Scheduled(cast(Any, batch), [], [], [], first_rows[:-1].tolist(), [], drafts, given)

    def drawn(result: StepResult) -> tuple[Any, ...]:
        states = [
            sampler.new_state(
                SamplingParams(seed=index, logprobs=index % 3 or None, frequency_penalty=0.5),
                [1, 2],
                set(),
            )
            for index in range(len(sizes))
        ]
        got = draw(sampler, scheduled, states, result, rejection=rejection)
        assert [state.num_generated for state in states] == [len(run) for run in got.runs]
        assert all((index in got.errors) == (not run) for index, run in enumerate(got.runs))
        for run, draft in zip(got.runs, drafts, strict=False):
            assert run[:-1] == draft[: len(run[:-1])]
        none = [[None] * len(run) for run in got.runs]
        return got.runs, got.logprobs or none, got.errors

    expected = drawn(StepResult(logits, 0.0))
    rows = data.draw(st.integers(1, total), label="rows held")
    assert drawn(sliced(logits, rows)) == expected


@given(st.data())
def test_trees_give_what_token_by_token_gives(sampler: NativeSampler, data: st.DataObject) -> None:
    """Logits are a function of the tokens so far, and few tokens are likely, so that runs go over
    from branch to branch; drawing token by token goes on as long as there is a row.
    """
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1), label="seed"))
    broken = data.draw(st.booleans(), label="some rows are not numbers")
    known: dict[tuple[int, ...], Float32] = {}

    def row_behind(sequence: int, path: list[int]) -> Float32:
        key = (sequence, *path)
        if key not in known:
            known[key] = rng.standard_normal(VOCAB).astype(np.float32)
            known[key][:3] += 6
            if broken and rng.random() < 0.2:
                known[key][5] = np.nan
        return known[key]

    count = data.draw(st.integers(1, 4), label="sequences")
    paths = st.lists(st.integers(0, 2), max_size=5)
    drafts = [data.draw(paths, label="draft") for _ in range(count)]
    trees = [data.draw(st.lists(paths.filter(len), max_size=5), label="tree") for _ in drafts]
    rows: list[Float32] = []
    sample_rows = []
    for sequence, draft in enumerate(drafts):
        sample_rows.append(len(rows))
        rows += [row_behind(sequence, draft[:at]) for at in range(len(draft) + 1)]
    branches: dict[int, list[Branch]] = {}
    for sequence, tree in enumerate(trees):
        for path in tree if drafts[sequence] else ():
            branches.setdefault(sequence, []).append(Branch(0, path, len(rows)))
            rows += [row_behind(sequence, path[: at + 1]) for at in range(len(path))]
    logits = np.stack(rows)
    batch = SimpleNamespace(logits_rows=np.arange(len(rows)))
    nobody: Any = [None] * count
    scheduled = Scheduled(
        cast(Any, batch), nobody, [], nobody, sample_rows, [], drafts, branches=branches
    )
    params = [
        SamplingParams(
            seed=int(rng.integers(100)),
            logprobs=2 if rng.random() < 0.5 else None,
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            presence_penalty=float(rng.choice([0.0, 1.5])),
        ).validated(VOCAB)
        for _ in range(count)
    ]

    def new_states() -> list[SamplerState]:
        return [sampler.new_state(each, [1, 2], set(), 0) for each in params]

    runs, logprobs, errors = [], [], {}
    for sequence, state in enumerate(new_states()):
        run: list[int] = []
        given: list[Any] = []
        held = [drafts[sequence], *(branch.token_ids for branch in branches.get(sequence, ()))]
        while any(path[: len(run)] == run for path in held):
            sampled = sampler.sample(row_behind(sequence, run)[None], [0], [state])
            if sampled.errors:
                if not run:
                    errors[sequence] = sampled.errors[0]
                break
            run += sampled.token_ids
            given += sampled.logprobs or [None]
        runs.append(run)
        logprobs.append(given)

    held_rows = data.draw(st.integers(1, len(rows)), label="rows held")
    for result in StepResult(logits, 0.0), sliced(logits, held_rows):
        states = new_states()
        drawn = draw(sampler, scheduled, states, result)
        assert drawn.runs == runs
        assert (drawn.logprobs or [[None] * len(run) for run in runs]) == logprobs
        assert drawn.errors == errors
        assert [state.num_generated for state in states] == [len(run) for run in runs]
        for sequence, run in enumerate(runs):
            if run:  # who holds what the run rests on
                branch = scheduled.taken(sequence, run)
                path = drafts[sequence] if branch is None else branch.token_ids
                assert path[: len(run) - 1] == run[:-1]
                row = scheduled.last_row(sequence, run)
                assert logits[row].tobytes() == row_behind(sequence, run[:-1]).tobytes()


@pytest.mark.parametrize("wrong", [False, True])
def test_trees_keep_the_distribution_under_rejection(sampler: NativeSampler, wrong: bool) -> None:
    """A draft drawn from q with two certain alternatives; 20,000 pairs of tokens against the exact
    probabilities. Wrong: an alternative is followed in place of drawing the second token anew.
    """
    few = 4
    rng = np.random.default_rng(5)
    logits = np.full((1 + few, VOCAB), -np.inf, np.float32)  # at first, and behind each token
    logits[:, :few] = rng.normal(0, 1, (1 + few, few))
    p = np.exp(logits[:, :few])
    p /= p.sum(axis=1, keepdims=True)
    q = np.zeros((2, VOCAB), np.float32)
    q[:, :few] = rng.dirichlet(np.ones(few), 2)
    alternatives = [[1, 2], [3, 0]]
    count, seed = 1000, 0
    counts = np.zeros((few, few), int)
    followed = 0
    for _ in range(20):
        drafts = rng.choice(few, (count, 1), p=q[0, :few] / q[0, :few].sum()).tolist()
        states = [
            sampler.new_state(SamplingParams(seed=seed + at), [], set()) for at in range(count)
        ]
        seed += count
        rows: list[int] = []  # of ``logits``
        sample_rows = []
        for draft in drafts:
            sample_rows.append(len(rows))
            rows += [0, 1 + draft[0]]
        branches: dict[int, list[Branch]] = {}
        for index in range(count):
            for path in alternatives:
                branches.setdefault(index, []).append(Branch(0, path, len(rows)))
                rows += [1 + path[0], 1 + path[1]]
        nobody: Any = [None] * count
        scheduled = Scheduled(
            cast(Any, SimpleNamespace(logits_rows=np.arange(len(rows)))),
            nobody, [], nobody, sample_rows, [], drafts, [q] * count, branches=branches,
        )  # fmt: skip
        drawn = draw(sampler, scheduled, states, StepResult(logits[rows], 0.0), rejection=True)
        taken = [scheduled.taken(index, run) for index, run in enumerate(drawn.runs)]
        followed += sum(branch is not None for branch in taken)
        short = [index for index, run in enumerate(drawn.runs) if len(run) == 1]
        last = [1 + drawn.runs[index][0] for index in short]
        rest = sampler.verify(
            logits, last, [states[index] for index in short], [-1] * len(short), [None] * len(short)
        )
        for index, token in zip(short, rest.token_ids, strict=True):
            drawn.runs[index].append(token)
        for run, branch in zip(drawn.runs, taken, strict=True):
            if wrong and branch is not None:
                run[1] = branch.token_ids[1]
            counts[run[0], run[1]] += 1
    assert followed > 2000
    exact = p[0][:, None] * p[1:]
    probability = chi_square(counts.ravel(), exact.ravel())
    assert probability < 1e-6 if wrong else probability > 1e-4
