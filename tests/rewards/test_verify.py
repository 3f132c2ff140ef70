"""Reward columns from rows: decoding, weights, sources and failures, without blocking."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from braidrl.algorithms.ragged import Ragged
from braidrl.config import RewardConfig, VerifierConfig
from braidrl.data.rows import Objects, Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import Sums
from braidrl.rewards.verify import RuleRewards, decoded

OWN = str(Path(__file__).with_name("own_verifiers.py"))


@pytest.fixture(scope="module")
def tokenizer():
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    return made


def rows_of(tokenizer, responses, answers, sources=None, prefix=""):
    prompt = tokenizer.encode("1+1=").ids
    sampled = [[*tokenizer.encode(response).ids, tokenizer.token_to_id("<end>")] for response in responses]
    masks = [[False] * len(prompt) + [True] * len(ids) for ids in sampled]
    return Rows(
        {
            "source": torch.tensor(sources or [0] * len(responses)),
            prefix + "tokens": Ragged.from_rows([prompt + ids for ids in sampled], torch.int64),
            prefix + "action_mask": Ragged.from_rows(masks, torch.bool),
            "metadata": Objects(tuple({"prompt": "1+1=", "answer": answer, "level": 3} for answer in answers)),
        }
    )


def rewards_of(tokenizer, verify, per_source=None, **settings):
    config = RewardConfig(**{"verify": verify, "timeout_s": 5.0, **settings})
    ends = {tokenizer.token_to_id("<end>")}
    return closing(RuleRewards(config, per_source or {}, tokenizer, ends=ends))


def test_right_and_wrong_get_the_scores_of_each_call(tokenizer):
    rows = rows_of(tokenizer, ["#### 2", "#### 3", "2"], ["2"] * 3)
    with rewards_of(tokenizer, "gsm8k") as rewards:
        columns, others = (rewards.submit(rows).result(scores) for scores in ((1.0, -1.0), (5.0, 2.0)))
    assert {name: (column.dtype, column.tolist()) for name, column in columns.items()} == {
        "score": (torch.float32, [1.0, -1.0, -1.0]),
        "correct": (torch.float32, [1.0, 0.0, 0.0]),
        "reward": (torch.float32, [1.0, -1.0, -1.0]),
    }
    assert others["reward"].tolist() == [5.0, 2.0, 2.0]


def test_only_action_tokens_are_read_also_in_several_turns(tokenizer):
    ids = tokenizer.encode("ask12tool34").ids
    mask = [False] * 3 + [True] * 2 + [False] * 4 + [True] * 2
    rows = rows_of(tokenizer, ["x"], ["1234"]).with_columns(
        {"tokens": Ragged.from_rows([ids], torch.int64), "action_mask": Ragged.from_rows([mask], torch.bool)}
    )
    with rewards_of(tokenizer, "exact") as rewards:
        assert rewards.submit(rows).result()["correct"].tolist() == [1.0]


def test_several_verifiers_are_weighted_and_the_first_says_what_is_correct(tokenizer):
    verify = [
        "exact",
        {"name": f"{OWN}:length", "weight": 0.5, "params": {"most": 4}},
        {"name": "format", "weight": 0.1, "params": {"pattern": "..?"}},
        {"name": "format", "weight": 0.01, "params": {"pattern": "b.*"}},
    ]
    with rewards_of(tokenizer, verify) as rewards:
        columns = rewards.submit(rows_of(tokenizer, ["ab", "bbbbbb"], ["ab", "no"])).result()
    assert columns["correct"].tolist() == [1.0, 0.0]
    assert columns["reward"].tolist() == pytest.approx([1 + 0.25 + 0.1, 0.5 + 0.01])
    assert torch.equal(columns["score"], columns["reward"])
    assert columns["score_length"].tolist() == [0.5, 1.0]
    assert columns["score_format"].tolist() == [1.0, 0.0] and columns["score_format_2"].tolist() == [0.0, 1.0]


def test_a_bare_score_counts_as_correct_from_the_correct_score_on(tokenizer):
    with rewards_of(tokenizer, {"name": f"{OWN}:length", "params": {"most": 4}}) as rewards:
        columns = rewards.submit(rows_of(tokenizer, ["abc", "abcd"], ["", ""])).result()
    assert columns["score"].tolist() == [0.75, 1.0] and columns["correct"].tolist() == [0.0, 1.0]


def test_a_source_may_have_its_own_verifiers(tokenizer):
    per_source = {1: [VerifierConfig(name="gsm8k")]}
    rows = rows_of(tokenizer, ["#### 2", "#### 2", "2"], ["2"] * 3, sources=[0, 1, 0])
    with rewards_of(tokenizer, "exact", per_source) as rewards:
        columns = rewards.submit(rows).result()
    assert columns["correct"].tolist() == [0.0, 1.0, 1.0]
    assert columns["score_gsm8k"].isnan().tolist() == [True, False, True]


def test_failed_checks_are_wrong_and_counted_by_reason(tokenizer):
    words = ["ok", "raise", "hang", "die", "raise", "ok"]
    with rewards_of(tokenizer, [f"{OWN}:by_word", "exact"], timeout_s=1.5, processes=2) as rewards:
        pending = rewards.submit(rows_of(tokenizer, words, ["ok"] * 6))
        columns = pending.result((1.0, -1.0))
    assert columns["score_by_word"].tolist() == [1.0, -1.0, -1.0, -1.0, -1.0, 1.0]
    assert columns["correct"].tolist() == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0]
    kinds, pairs = pending.count((1.0, -1.0), sums := Sums()), sums.pairs()
    counts = {kind: pairs[f"reward/failures/{'/'.join(kind)}"][0] for kind in kinds}
    assert counts == {("by_word", "exception"): 2, ("by_word", "timeout"): 1, ("by_word", "died"): 1}
    assert pairs["reward/failed_fraction"] == (4, 6)


def test_rows_are_checked_as_they_come_and_submitting_never_waits(tokenizer):
    verify = [f"{OWN}:remote", "exact"]
    with rewards_of(tokenizer, verify, timeout_s=600.0) as rewards:
        words = ["hang", "ok", "no", "ok", "ok"]
        hanging, *pending = [rewards.submit(rows_of(tokenizer, [word], ["ok"])) for word in words]
        assert [p.result()["correct"].item() for p in reversed(pending)] == [1.0, 1.0, 0.0, 1.0]
        assert all(p.done() for p in pending) and not hanging.done()


def test_a_namespace_prefixes_the_tokens_read_and_the_columns_written(tokenizer):
    with rewards_of(tokenizer, "exact") as rewards:
        columns = rewards.submit(rows_of(tokenizer, ["2"], ["2"], prefix="greedy."), of="greedy").result()
    assert {name: column.item() for name, column in columns.items()} == {
        "greedy.score": 1.0,
        "greedy.correct": 1.0,
        "greedy.reward": 1.0,
    }


def test_no_rows_give_empty_columns(tokenizer):
    with rewards_of(tokenizer, "exact") as rewards:
        columns = rewards.submit(rows_of(tokenizer, [], [])).result()
    assert {name: tuple(column.shape) for name, column in columns.items()} == {
        "score": (0,),
        "correct": (0,),
        "reward": (0,),
    }


@pytest.mark.parametrize("verify", [[], "gsm8", [{"name": "exact", "params": {"lastline": True}}]])
def test_a_mistaken_verifier_is_refused_before_anything_runs(tokenizer, verify):
    with pytest.raises(UserError):
        rewards_of(tokenizer, verify)


@pytest.mark.parametrize("cleans", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_rows_decoded_at_once_have_the_texts_of_rows_decoded_alone(tokenizer, skips, cleans):
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=cleans)
    end = tokenizer.token_to_id("<end>")
    rows = [[*tokenizer.encode(text).ids, end] for text in ("", "4", "a , b .", "ß do n't")]
    assert decoded(fast, rows, skips) == [fast.decode(ids, skip_special_tokens=skips) for ids in rows]
