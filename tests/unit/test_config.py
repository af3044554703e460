"""ds_tsp.config: what is accepted, every error message, and agreement with DeepSpeed's own batch rule."""

import base64
import copy
import json
import re
from argparse import Namespace
from pathlib import Path

import pytest
from deepspeed.runtime import constants
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_tsp.config import TSPConfig, load_config, parse

ROOT = Path(__file__).parents[2]
DOC = (ROOT / "docs" / "config.md").read_text()
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "tsp": {"size": 2}}


def refused(config, world_size=8):
    with pytest.raises(ValueError) as info:
        parse(config, world_size)
    assert type(info.value) is ValueError
    return str(info.value)


# ---- the section

KEYS = "size, schedule, layout, kernel, overlap, recompute, shard_vocab, loss_average, gather_logits, plan"


def test_defaults_and_frozen():
    tsp = parse(CONFIG, 8)
    expected = {
        "size": 2,
        "schedule": "tsp",
        "layout": "zigzag",
        "kernel": "auto",
        "overlap": True,
        "recompute": "selective",
        "shard_vocab": True,
        "loss_average": "batch",
        "gather_logits": True,
        "plan": None,
    }
    assert tsp.model_dump() == expected
    with pytest.raises(ValidationError, match="frozen"):
        tsp.size = 4


def test_all_keys():
    section = {
        "size": 3,
        "schedule": "tsp",
        "layout": "contiguous",
        "kernel": "reference",
        "overlap": False,
        "recompute": "full",
        "shard_vocab": False,
        "loss_average": "token",
        "gather_logits": False,
        "plan": {"h.*.q": "colwise"},
    }
    assert parse({"train_micro_batch_size_per_gpu": 1, "tsp": section}, 6).model_dump() == section


def test_parse_leaves_config_alone():
    before = copy.deepcopy(CONFIG)
    parse(CONFIG, 8)
    assert before == CONFIG


@pytest.mark.parametrize("key", ["tps", "TSP", "Tsp", "tsp_config", "tsp-size", "ds_tsp", "tspconfig", "tsps", "ts"])
def test_misspelt_section(key):
    assert refused({"train_batch_size": 8, key: {"size": 2}}) == f'unknown section "{key}": did you mean "tsp"?'
    both = refused(CONFIG | {key: {"size": 2}})
    assert both == f'unknown section "{key}": did you mean "tsp"?; "tsp" is there too: remove one of them'


def test_deepspeed_keys_are_not_misspellings():
    names = {value for value in vars(constants).values() if isinstance(value, str) and value.isidentifier()}
    names |= {"fp16", "steps_per_print", "zero_optimization", "tp", "aio", "compile", "pipeline", "tensorboard"}
    assert len(names) > 70
    assert parse({key: {} for key in names - {*BATCH_KEYS}} | CONFIG, 8).size == 2


def test_no_section_counts_divisors():
    assert "(1, 2, 4 for world 4)" in refused({"train_batch_size": 8}, 4)


@pytest.mark.parametrize("value", [None, True, [], {}, "4"])
def test_section_is_not_a_section(value):
    message = f'"tsp" must be a section such as "tsp": {{"size": 8}}, not {json.dumps(value)}'
    assert refused({"train_batch_size": 8, "tsp": value}) == message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"size": True}, "tsp.size=true should be a valid integer"),
        ({"size": 2.0}, "tsp.size=2.0 should be a valid integer"),
        ({"size": "auto"}, 'tsp.size="auto" should be a valid integer'),
        ({"size": -1}, "tsp.size=-1 should be greater than or equal to 1"),
        ({"size": 2, "layout": "auto"}, 'tsp.layout="auto" should be "zigzag" or "contiguous"'),
        ({"size": 2, "schedule": "ring"}, 'tsp.schedule="ring" should be "tsp" or "metp"'),
        ({"size": 2, "schedule": []}, 'tsp.schedule=[] should be "tsp" or "metp"'),
        ({"size": 2, "plan": []}, "tsp.plan=[] should be a valid dictionary"),
        ({"size": 2, "plan": {3: "colwise"}}, "tsp.plan[3]=3 should be a valid string"),
        (
            {"size": 2, "strict": True},
            f"unknown key tsp.strict=true: allowed keys: {KEYS}",
        ),
        ({"size": 2, 3: 4}, f"unknown key tsp.3=4: allowed keys: {KEYS}"),
    ],
)
def test_bad_key(section, message):
    assert refused({"train_batch_size": 8, "tsp": section}) == message


@pytest.mark.parametrize(("world", "choice"), [(8, "1, 2, 4 or 8"), (1, "1"), (7, "1 or 7")])
def test_size_must_divide_world(world, choice):
    message = f"tsp.size=6 does not divide world size {world}; use {choice}"
    assert refused({"train_batch_size": 8, "tsp": {"size": 6}}, world) == message


@pytest.mark.parametrize("value", [0, 1, None, "auto"])
def test_other_schemes_switched_off_are_fine(value):
    config = CONFIG | {"tensor_parallel": {"autotp_size": value}, "sequence_parallel_size": value}
    assert parse(config, 8).size == 2


# ---- the batch sizes


def deepspeed_accepts(batch, dp):
    rule = object.__new__(DeepSpeedConfig)  # its batch rule alone, without a process group
    rule.world_size = dp
    for key in BATCH_KEYS:
        setattr(rule, key, batch.get(key))
    try:
        rule._configure_train_batch_size()
    except (AssertionError, ZeroDivisionError):
        return False
    return True


def accepts(batch, size, dp):
    try:
        parse({"tsp": {"size": size}} | batch, size * dp)
    except ValueError:
        return False
    return True


NUMBER = st.none() | st.integers(-1, 24)


@settings(max_examples=400)
@given(st.tuples(NUMBER, NUMBER, NUMBER), st.integers(1, 4), st.integers(1, 4))
@example((16, 2, 1), 4, 2)
def test_batch_rule_is_deepspeeds(batch, size, dp):
    given_keys = {key: value for key, value in zip(BATCH_KEYS, batch, strict=True) if value is not None}
    assert accepts(given_keys, size, dp) == deepspeed_accepts(given_keys, dp)


@settings(max_examples=200)
@given(*[st.integers(1, 6)] * 4, st.sets(st.sampled_from(BATCH_KEYS), max_size=2))
def test_consistent_batch_is_accepted(micro, steps, size, dp, missing):
    batch = dict(zip(BATCH_KEYS, (micro * steps * dp, micro, steps), strict=True))
    for key in missing:
        del batch[key]
    if batch.keys() != {BATCH_KEYS[2]}:
        assert accepts(batch, size, dp) == deepspeed_accepts(batch, dp) is True


@settings(max_examples=200)
@given(st.tuples(*[st.integers(1, 24)] * 3), st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 3]))
def test_suggested_batch_is_accepted(batch, size, dp, count):
    given_keys = dict(zip(BATCH_KEYS[:count], batch, strict=False))
    if not accepts(given_keys, size, dp):
        message = refused({"tsp": {"size": size}} | given_keys, size * dp).rpartition("; use ")[2]
        fixes = [fix if "=" in fix else f"{BATCH_KEYS[0]}={fix}" for fix in message.split(" or ")]
        assert fixes
        for fix in fixes:
            key, value = fix.split("=")
            assert accepts(given_keys | {key: int(value)}, size, dp), fix


def test_batch_that_fits_neither_dp_nor_world():
    config = {"tsp": {"size": 4}} | dict(zip(BATCH_KEYS, (12, 2, 1), strict=True))
    message = refused(config)
    assert "counts the world size" not in message
    assert message.endswith("= 4; use train_batch_size=4 or gradient_accumulation_steps=3")


def test_batch_auto_is_left_alone():
    assert parse({"tsp": {"size": 4}} | dict.fromkeys(BATCH_KEYS, "auto"), 8).size == 4


def test_batch_text_is_refused():
    message = refused({"tsp": {"size": 4}, "train_batch_size": "8"})
    assert message == 'train_batch_size="8" must be a positive integer'


# ---- loading


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(CONFIG))
    return file


def unreadable(*sources):
    with pytest.raises(ValueError) as info:
        load_config(*sources)
    assert type(info.value) is ValueError
    return str(info.value)


def test_load_every_source(path):
    encoded = base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode()
    for source in (CONFIG, str(path), path, encoded):
        assert load_config(source) == CONFIG
        assert load_config(None, Namespace(deepspeed_config=source)) == CONFIG
        assert load_config(source, Namespace(deepspeed_config=None)) == CONFIG
        assert load_config(source, Namespace(deepspeed_config=str(path))) == CONFIG
    assert load_config(args=Namespace(deepscale_config=str(path))) == CONFIG


def test_load_equal_whatever_the_order_of_keys():
    # Base64 comes out of DeepSpeed's loader as OrderedDicts, and two of those compare by order.
    orders = (CONFIG, dict(reversed(CONFIG.items())))
    one, other = (base64.urlsafe_b64encode(json.dumps(order).encode()).decode() for order in orders)
    assert load_config(one, Namespace(deepspeed_config=other)) == CONFIG


def test_load_gives_a_copy_but_shares_leaves():
    group = (value for value in ())  # like a process group, cannot be deep-copied
    config = CONFIG | {"tensor_parallel": {"tp": {"tp_group": group}}}
    loaded = load_config(config)
    loaded["tsp"]["size"] = 7
    loaded["zero_optimization"]["stage"] = 3
    assert config["tsp"] == {"size": 2} and config["zero_optimization"] == {"stage": 2}
    assert loaded["tensor_parallel"]["tp"]["tp_group"] is group


def test_load_two_that_differ(path, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(CONFIG | {"tsp": {"size": 4}, "fp16": {"enabled": True}}))
    message = unreadable(str(path), Namespace(deepspeed_config=str(other)))
    assert message == (
        f'config="{path}" and args.deepspeed_config="{other}" differ in "fp16", "tsp"; pass only one of them'
    )
    message = unreadable(CONFIG | {"a": 1}, Namespace(deepspeed_config=str(path)))
    assert message == f'config (a dict) and args.deepspeed_config="{path}" differ in "a"; pass only one of them'


@pytest.mark.parametrize("args", [None, Namespace(), Namespace(deepspeed_config=None)])
def test_load_nothing(args):
    assert unreadable(None, args) == (
        'no DeepSpeed config: pass config={...} or config="ds.json" to ds_tsp.initialize, '
        "or start the script with --deepspeed_config ds.json and pass its args"
    )


@pytest.mark.parametrize("name", ["ds.json", "missing/ds.json", "abcd", "AAAA"])
def test_load_missing_file(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert unreadable(name) == (f'config="{name}" does not exist, and is not base64 of a JSON object; cwd {tmp_path}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tsp": {"size": 2}', "cannot be read as JSON: Bad key name"),
        ('{"tsp": {}, "tsp": {}}', "cannot be read as JSON: Duplicate keys in DeepSpeed config: ['tsp']"),
        ("", "holds no JSON object; expected"),
        ("[1]", "holds no JSON object; expected"),
        ("text", "holds no JSON object; expected"),
    ],
)
def test_load_bad_json(text, message, path):
    path.write_text(text)
    assert unreadable(str(path)).startswith(f'config="{path}" {message}')
    assert unreadable(None, Namespace(deepspeed_config=path)).startswith(f'args.deepspeed_config="{path}" {message}')


def test_load_other_unreadable_sources(tmp_path):
    assert unreadable(str(tmp_path)).startswith(f'config="{tmp_path}" cannot be read as JSON: [Errno 21]')
    assert unreadable(3) == "config must be a dict, a path or base64, not int"
    assert unreadable("A" * 400).startswith(f'config="{"A" * 60}..." does not exist')
    assert unreadable({}) == 'config (a dict) holds no JSON object; expected {"tsp": {"size": 2}, ...}'


# ---- docs/config.md and ds_configs/


@pytest.mark.parametrize("key", TSPConfig.model_fields)
def test_every_key_is_documented(key):
    assert re.search(rf"^\| `{key}` \|", DOC, re.MULTILINE)


EXAMPLES = re.findall(r"```json\n(.*?)```\n(?:```text\n(.*?)\n```)?", DOC, re.DOTALL)


@pytest.mark.parametrize(("text", "message"), EXAMPLES, ids=[message[:40] or "accepted" for _, message in EXAMPLES])
def test_documented_example(text, message):
    config = json.loads(text)
    if message:
        assert refused(config, 8) == message
    else:
        assert parse(config, 8).size == config["tsp"]["size"]


def test_documentation_has_examples_of_both_kinds():
    assert sum(not message for _, message in EXAMPLES) == 3
    assert len(EXAMPLES) >= 20


def test_every_ds_config_parses():
    files = sorted((ROOT / "ds_configs").glob("*.json"))
    assert files, "ds_configs/ holds no JSON"
    for file in files:
        config = load_config(file)
        assert parse(config, config["tsp"]["size"]).size == config["tsp"]["size"], file
