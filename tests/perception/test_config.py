"""Configuration: overrides, checks, JSON; every mistake is answered with a line that says what to write."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from perception.augment_config import SignAugmentConfig
from perception.config import (
    MODEL_CONFIGS,
    RunConfig,
    flatten,
    from_json,
    override,
    to_json,
    validate,
)
from perception.config_checks import _NOT_NEGATIVE, _POSITIVE, _SHARES, CHOICES, FORMATS
from perception.errors import UserError, nearest
from perception.model_config import SignModelConfig
from pipelines.configs import CONFIGS

BASE = RunConfig(task="lane", name="base")
SIGN = RunConfig(
    task="sign",
    name="sign",
    augment=SignAugmentConfig(),
    model=SignModelConfig(num_classes=4, backbone_widths=(8, 16, 24, 32)),
)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("optim.lr=3e-4", 3e-4),
        ("optim.lr = 1", 1.0),
        ("train.seed=7", 7),
        ("train.channels_last=false", False),
        ("augment.scale_range=[0.9, 1]", (0.9, 1.0)),
        ("model.backbone_widths=[8,16,24,32]", (8, 16, 24, 32)),
        ("data.source=/data/tusimple=2", "/data/tusimple=2"),
        ('data.source="quoted"', "quoted"),
        ("data.source=2024", "2024"),
        ("data.source=1e5", "1e5"),
        ("data.source=true", "true"),
        ("data.source=", ""),
        ("distributed.engine=torch", "torch"),
        ("name=other", "other"),
    ],
)
def test_override_takes_a_value_of_the_fields_type(assignment: str, expected: object) -> None:
    changed = override(BASE, [assignment])
    name = assignment.split("=")[0].strip()
    value = flatten(changed)[name]
    assert value == expected and type(value) is type(expected)
    assert {k: v for k, v in flatten(changed).items() if k != name} == {
        k: v for k, v in flatten(BASE).items() if k != name
    }


def test_the_last_override_wins_and_the_original_stays() -> None:
    assert override(BASE, ["optim.lr=1", "optim.lr=2"]).optim.lr == 2
    assert BASE.optim.lr == RunConfig("lane", "x").optim.lr
    assert override(BASE, []) == BASE


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optim.lr", "--set optim.lr: write it as name=value"),
        ("optim.lrr=1", '--set optim.lrr: no such field; did you mean "optim.lr"?'),
        ("lr=1", 'did you mean "optim.lr"?'),
        ("optin.lr=1", 'did you mean "optim.lr"?'),
        ("model.neck_channel=1", 'did you mean "model.neck_channels"?'),
        ("zzz=1", "`show-config` lists all names"),
        ("=1", "no such field"),
        ("optim=1", "name one of its fields, e.g. optim.name"),
        ("optim.lr.x=1", "lr has no fields of its own"),
        ("optim.lr=fast", "--set optim.lr: must be of type float, got 'fast'"),
        ("optim.lr=true", "must be of type float"),
        ("optim.lr=null", "must be of type float"),
        ("optim.lr=" + "9" * 400, "--set optim.lr: "),
        ("train.seed=1.5", "must be of type int"),
        ("train.seed=true", "must be of type int"),
        ("train.channels_last=1", "must be of type bool"),
        ("train.channels_last=True", "must be of type bool"),
        ("augment.scale_range=1", "must be a list"),
        ("augment.scale_range=[1]", "must have 2 values, got 1"),
        ('augment.scale_range=[1,"a"]', "must be of type float"),
        ("model.num_classes=4", 'no such field; did you mean "model.max_lanes"?'),
        ("task=sign", "task = sign: the model's settings are another task's"),
        ("task=sing", 'task = "sing" is unknown; did you mean "sign"?'),
        ("optim.lr=NaN", "optim.lr = nan: must be finite"),
        ("optim.lr=1e999", "must be finite"),
        ("augment.scale_range=[0.5, Infinity]", "must be finite"),
        ("distributed.engine=horovd", '"horovd" is unknown; did you mean "horovod"?'),
        ("distributed.engine=q", "allowed: auto, horovod, solo, torch"),
        ("optim.lr=0", "optim.lr = 0.0: must be above 0"),
        ("train.num_samples=0", "must be above 0"),
        ("train.batch_size_per_rank=-1", "must be above 0"),
        ("train.seed=-1", "must not be negative"),
        ("data.workers_per_rank=-1", "must not be negative"),
        ("augment.flip_probability=1.5", "must be between 0 and 1"),
        ("augment.scale_range=[1.2, 0.8]", "the smaller must come first"),
        ("augment.scale_range=[0, 1]", "must be above 0"),
        ("optim.final_lr_fraction=-0.1", "must be between 0 and 1"),
        ("model.input_height=100", "multiples of 32"),
        ("model.input_width=401", "multiples of 32"),
        ("model.input_height=0", "model.input_height = 0: must be above 0"),
        ("model.input_width=-32", "must be above 0"),
        ("model.crop_top_fraction=1", "must be in [0, 1)"),
        ("model.num_rows=2", "at least 3"),
        ("train.target_metric=llama_f1_50", 'did you mean "llamas_f1_50"?'),
        ("model.backbone_widths=[8,16,24]", "4 values"),
        ("model.backbone_widths=[]", "above 0"),
        ("model.backbone_blocks=[1,0,1,1]", "above 0"),
    ],
)
def test_a_wrong_override_is_answered_with_a_cure(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        override(BASE, [assignment])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_choice_is_accepted_and_nothing_else() -> None:
    for name, allowed in CHOICES.items():
        for value in allowed:
            assert flatten(override(BASE, [f"{name}={value}"]))[name] == value
        with pytest.raises(UserError, match=f"{name} = "):
            override(BASE, [f"{name}=nothing-like-it"])


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_committed_configuration_survives_json(name: str) -> None:
    config = CONFIGS[name]()
    validate(config)
    again = from_json(to_json(config), "config.json")
    assert again == config and hash(again) == hash(config)
    assert to_json(again) == to_json(config)


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_field_can_be_set_to_its_own_value_by_name(name: str) -> None:
    config = CONFIGS[name]()
    assert override(config, [f"{key}={json.dumps(value)}" for key, value in flatten(config).items()]) == config


def test_a_missing_field_takes_its_default() -> None:
    raw = json.loads(to_json(BASE))
    del raw["train"]["seed"], raw["augment"]
    assert from_json(json.dumps(raw), "config.json") == BASE


def changed(section: str, name: str, value: object) -> str:
    raw = json.loads(to_json(BASE))
    (raw[section] if section else raw)[name] = value
    return json.dumps(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not a run configuration"),
        ('{"task": "lane"}', "task and name are missing"),
        (changed("optim", "learning_rate", 1), "field optim.learning_rate is unknown"),
        (changed("optim", "lrr", 1), 'field optim.lrr is unknown; did you mean "lr"?'),
        (changed("", "modell", {}), 'field modell is unknown; did you mean "model"?'),
        (changed("", "optim", 3), "field optim must be an object"),
        (changed("", "name", 3), "field name: must be of type str, got 3"),
        (changed("data", "source", None), "field data.source: must be of type str"),
        (changed("optim", "lr", "fast"), "field optim.lr: must be of type float"),
        (changed("optim", "lr", float("nan")), "optim.lr = nan: must be finite"),
        (changed("train", "seed", 0.5), "field train.seed: must be of type int"),
        (changed("model", "input_height", 33), "multiples of 32"),
        (changed("model", "proposal_grid", [1, 2, 3]), "must have 2 values, got 3"),
        (changed("distributed", "engine", "mpi"), 'distributed.engine = "mpi" is unknown'),
        (changed("", "task", "lan"), 'task = "lan" is unknown; did you mean "lane"?'),
        (changed("", "task", "depth"), 'task = "depth" is unknown; allowed: lane, sign'),
        (changed("", "task", ["lane"]), "field task: must be of type str"),
        (changed("", "task", "sign"), "field model.angle_weight is unknown"),
        (changed("", "model", 3), "field model must be an object"),
        ('{"task": "lane", "name": "x", "train": {"seed": ' + "9" * 5000 + "}}", "not JSON"),
    ],
)
def test_a_wrong_file_is_named_with_its_field(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        from_json(text, "runs/a/config.json")
    assert str(caught.value).startswith("runs/a/config.json: ") and message in str(caught.value)


def test_validate_checks_a_configuration_made_in_python() -> None:
    with pytest.raises(UserError, match=r"model\.input_height"):
        validate(replace(BASE, model=replace(BASE.model, input_height=48)))


def test_nearest_names_one_or_lists_all() -> None:
    assert nearest("lane-smal", ["lane", "lane-small"]) == '; did you mean "lane-small"?'
    assert nearest("qqq", ["b", "a"]) == "; allowed: a, b"


@pytest.mark.parametrize("module", ["perception.config", "pipelines.configs", "perception.distributed.choice"])
def test_configuration_imports_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; sys.exit(', '.join({{'torch', 'numpy', 'cv2'}} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# --- Two tasks, two models ---


def test_a_sign_configuration_survives_json_and_takes_overrides() -> None:
    validate(SIGN)
    assert from_json(to_json(SIGN), "config.json") == SIGN
    assert override(SIGN, [f"{key}={json.dumps(value)}" for key, value in flatten(SIGN).items()]) == SIGN
    changed_model = override(SIGN, ["model.depthwise=true", "model.num_classes=9", "optim.lr=1"]).model
    assert changed_model == replace(SIGN.model, depthwise=True, num_classes=9)


@pytest.mark.parametrize(("task", "kind"), [("lane", type(BASE.model)), ("sign", SignModelConfig)])
def test_a_file_without_a_model_has_its_tasks_default_one(task: str, kind: type) -> None:
    assert from_json(json.dumps({"task": task, "name": "x"}), "config.json").model == kind()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.num_rows=72", "no such field"),
        ("num_clases=3", 'did you mean "model.num_classes"?'),
        ("model.num_class=3", 'did you mean "model.num_classes"?'),
        ("model.num_classes=-1", "model.num_classes = -1: must not be negative"),
        ('model.class_names=["stop"]', "model.num_classes = 4, but model.class_names has 1"),
        ('model.class_names=["a","b","a","c"]', "a name stands twice"),
        ("model.tile_size=100", "a multiple of 32"),
        ("model.tile_size=128", "above the overlap"),
        ("augment.min_visibility=2", "must be between 0 and 1"),
        ("augment.rotate_degrees=2", "no such field"),
        ("data.format=culane", 'data.format = "culane" is unknown; allowed: auto, bdd100k, coco'),
        ("data.format=gtsdbb", 'did you mean "gtsdb"?'),
        ("model.max_detections=0", "must be above 0"),
        ("model.box_weight=-1", "must not be negative"),
        ("model.nms_iou_threshold=1.5", "must be between 0 and 1"),
        ("model.input_width=100", "multiples of 32"),
        ("model.backbone_blocks=[1,1]", "4 values"),
        ("model.stem=patches", 'did you mean "patch"?'),
        ("task=lane", "task = lane: the model's settings are another task's"),
    ],
)
def test_a_wrong_override_of_a_sign_model_is_answered_with_a_cure(assignment: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        override(SIGN, [assignment])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match="take a lane model"):
        validate(replace(BASE, model=SignModelConfig()))
    with pytest.raises(UserError, match=r"task = lane: the augmentation's settings are another task's"):
        validate(replace(BASE, augment=SignAugmentConfig()))
    raw = {**json.loads(to_json(BASE)), "model": json.loads(to_json(SIGN))["model"]}
    with pytest.raises(UserError, match=r"config\.json: field model\.\w+ is unknown"):
        from_json(json.dumps(raw), "config.json")


def test_every_checked_name_is_a_field_of_some_task() -> None:
    """A check of a misspelt name would check nothing."""
    known = flatten(BASE).keys() | flatten(SIGN).keys()
    assert {*CHOICES, *_POSITIVE, *_NOT_NEGATIVE, *_SHARES} <= known
    assert FORMATS.keys() == MODEL_CONFIGS.keys()
