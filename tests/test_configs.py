"""Every shipped config composes and builds what it describes; wrong values are refused."""

import dataclasses
import inspect
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from lightning_entrain.callbacks.checkpoint import RunCheckpoint
from lightning_entrain.callbacks.variability import WorkloadVariabilityMonitor
from lightning_entrain.command_line import explain, nearest
from lightning_entrain.conf_path import conf_dir
from lightning_entrain.config import (
    GROUPS,
    EntrainStrategyConf,
    ModuleConf,
    num_devices,
    register_configs,
    validate,
)
from lightning_entrain.config_reference import choices, known_names, reference_markdown, sections
from lightning_entrain.datamodule import EntrainDataModule
from lightning_entrain.errors import ConfigError
from lightning_entrain.loggers import StepCSVLogger
from lightning_entrain.model_shapes import shape_of_model
from lightning_entrain.models.entrain_model import EntrainModel
from lightning_entrain.plan.types import ParallelPlan
from lightning_entrain.runtime.schedules import AUTO, SCHEDULES
from lightning_entrain.strategy import EntrainStrategy
from lightning_entrain.train import build_module, build_trainer
from lightning_entrain.workload.hf_config import model_shape

ROOT = Path(__file__).resolve().parents[1]
GROUP_NAMES = ["data", "model", "strategy", "trainer", "logger", "callbacks", "experiment"]
CHOICES = [
    f"{group}={path.stem}"
    for group in GROUP_NAMES
    for path in sorted((conf_dir() / group).iterdir())
]
IN_MEMORY = ["data=synthetic", "model=nano_vlm"]


@pytest.fixture(autouse=True)
def quiet_wandb(tmp_path, monkeypatch):
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


@pytest.fixture
def composed(tmp_path):
    def build(*overrides):
        register_configs()
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return compose("train", overrides=[f"run_dir={tmp_path}", *overrides])

    return build


def test_an_option_without_default_is_asked_for(composed):
    with pytest.raises(ConfigError, match=r"folder is missing.*set data.source.folder="):
        validate(composed("data=folder"))


def test_there_is_a_choice_for_every_group():
    assert {choice.split("=")[0] for choice in CHOICES} == set(GROUP_NAMES)
    defaults = OmegaConf.load(conf_dir() / "train.yaml").defaults
    assert [next(iter(d)) for d in defaults if OmegaConf.is_dict(d)] == GROUP_NAMES


@pytest.mark.parametrize("choice", CHOICES)
def test_every_shipped_config_composes_and_builds(choice, composed, tmp_path):
    group, name = choice.split("=")
    # Data and models that take a while to make are built below.
    given = [text for text in IN_MEMORY if not text.startswith(f"{group}=")]
    config = composed(*given, choice, *(["data.source.folder=."] if name == "folder" else []))
    validate(config)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    trainer = build_trainer(config, num_devices(config))
    assert isinstance(trainer, pl.Trainer)
    if group != "data":
        datamodule = instantiate(config.data)
        datamodule.cache_dir = str(tmp_path)
        datamodule.prepare_data()
        assert isinstance(build_module(config, datamodule), pl.LightningModule)
    assert isinstance(instantiate(config.data), EntrainDataModule)


def test_defaults_are_what_the_readme_says(composed, tmp_path):
    config = composed()
    validate(config)
    assert num_devices(config) == 3
    assert config.data.source._target_.endswith("ChartSource")
    trainer = build_trainer(config, 3)
    assert isinstance(trainer.strategy, EntrainStrategy)
    assert [type(logger).__name__ for logger in trainer.loggers] == ["StepCSVLogger", "WandbLogger"]
    kinds = {type(callback) for callback in trainer.callbacks}
    assert {WorkloadVariabilityMonitor, RunCheckpoint} <= kinds
    assert trainer.loggers[0].save_dir == str(tmp_path)


def test_the_default_model_has_one_to_five_million_parameters(composed):
    config = composed()
    model = instantiate(config.model, vocab_size=1024)
    assert isinstance(model, EntrainModel)
    assert 1e6 <= sum(p.numel() for p in model.parameters()) <= 5e6


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["strategy=single"], 1),
        (["strategy.llm_stages=1"], 2),
        (["strategy.replicas=2"], 6),
        (["trainer.devices=3", "strategy.llm_stages=2"], 3),
        (["strategy.llm_stages=2"], 3),
        (["strategy.encoder_stages=2", "strategy.llm_stages=2"], 4),
        (["trainer.devices=3", "strategy.encoder_stages=2", "strategy.llm_stages=1"], 3),
        (["trainer.devices=4", "strategy.replicas=2"], 4),
        (["experiment=two_replicas"], 4),
        (["trainer.devices=1"], 1),
    ],
)
def test_processes_follow_from_the_layout(overrides, expected, composed):
    assert num_devices(composed(*overrides)) == expected


def test_machines_share_the_processes(composed):
    two = "+trainer.extra.num_nodes=2"
    for overrides, expected in (
        ([two, "trainer.devices=2", "strategy.replicas=2"], 2),
        ([two, "strategy.replicas=2"], 3),
        ([two, "strategy.replicas=4", "strategy.llm_stages=1"], 4),
        (["+trainer.extra.num_nodes=1"], 3),
    ):
        config = composed(*overrides)
        validate(config)
        assert num_devices(config) == expected
    for overrides, message in (
        ([two], "3 processes on trainer.extra.num_nodes=2"),
        ([two, "strategy=single"], "num_nodes is 2 with strategy=single"),
        ([two, "trainer.devices=2", "strategy.replicas=3"], "4"),
        (["+trainer.extra.num_nodes=0"], "num_nodes is 0"),
    ):
        with pytest.raises(ConfigError, match=message):
            num_devices(composed(*overrides))


def test_a_plan_decides_the_number_of_processes(composed, tmp_path):
    plan = ParallelPlan(
        dp=2,
        encoder_layers=((0, 3),),
        llm_layers=((0, 1), (1, 3)),
        num_microbatches=4,
        global_batch_size=16,
    )
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json())
    config = composed(*IN_MEMORY, f"strategy.plan={path}")
    validate(config)
    assert num_devices(config) == 6
    with pytest.raises(ConfigError, match=r"The plan is for 6 devices .*this job has 2"):
        validate(composed(*IN_MEMORY, f"strategy.plan={path}", "trainer.devices=2"))
    with pytest.raises(ConfigError, match=r"encoder_layers ends at layer 3.*has 4 layers"):
        validate(composed("data=synthetic", "model=tiny_vlm", f"strategy.plan={path}"))
    with pytest.raises(ConfigError, match=r"is 9\. Limit: divisible by 2 replicas"):
        validate(composed(*IN_MEMORY, f"strategy.plan={path}", "data.global_batch_size=9"))
    nodes = [*IN_MEMORY, f"strategy.plan={path}", "+trainer.extra.num_nodes=2"]
    for devices in ("null", "3"):
        on_two = composed(*nodes, f"trainer.devices={devices}")
        validate(on_two)
        assert num_devices(on_two) == 3
    assert build_trainer(config, 6).strategy.num_replicas == 2
    with pytest.raises(ConfigError, match=r"strategy\.plan=gone\.json cannot be read"):
        num_devices(composed("strategy.plan=gone.json"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_steps=-3"], r"trainer\.max_steps is -3\. Limit: at least -1"),
        (["module.learning_rate=0"], r"module\.learning_rate is 0\.0\. Limit: above 0"),
        (["module.learning_rate=nan"], r"module\.learning_rate is nan\. Limit: above 0"),
        (["module.optimizer=adam"], r"module\.optimizer is 'adam'\. Limit: one of adamw, sgd"),
        (["strategy.encoder_stages=0"], r"strategy\.encoder_stages is 0\. Limit: at least 1"),
        (
            ["data.val_fraction=1.5"],
            r"data\.val_fraction is 1\.5\. Limit: at least 0, at most 0\.9",
        ),
        (["data.source.num_samples=0"], r"data\.source\.num_samples is 0\. Limit: at least 1"),
        (["logger.wandb.mode=x"], r"logger\.wandb\.mode is 'x'\. Limit: one of auto"),
        (["callbacks.checkpoint.mode=up"], r"callbacks\.checkpoint\.mode is 'up'"),
        (["trainer.precision=8"], r"trainer\.precision is '8'\. Limit: one of 32-true"),
        (["strategy=single", "trainer.devices=2"], r"trainer\.devices is 2 with strategy=single"),
        (
            ["trainer.devices=3", "strategy.encoder_stages=1", "strategy.llm_stages=1"],
            r"3 device\(s\) for 1 replica\(s\) x \(1 encoder \+ 1 LLM\) stages\. Limit: .* = 2",
        ),
        (["trainer.devices=3", "strategy.replicas=2"], r"3 device\(s\) cannot hold 2 replicas"),
        (["trainer.devices=2", "strategy.llm_stages=2"], "leaves no rank for the other module"),
        (["seed=99999999999"], r"^seed is 99999999999\. Limit: at least 0, at most 4294967295"),
        (["strategy.replicas=3"], r"global_batch_size is 16\. Limit: divisible by 3 replicas"),
        (["data.micro_batch_size=4"], "num_microbatches is 4 and micro_batch_size is 4"),
        (["strategy.encoder_stages=5"], r"encoder_stages=5 for a module of 4 layer\(s\)"),
        (["trainer.devices=9"], "9 ranks per replica for a model of 4 encoder and 4 LLM layers"),
    ],
)
def test_a_value_out_of_range_is_one_clear_error(overrides, message, composed):
    with pytest.raises(ConfigError, match=message) as caught:
        validate(composed(*overrides))
    assert "Remedy: " in str(caught.value)


@pytest.mark.parametrize(
    ("override", "kind", "message"),
    [
        ("strategy.llm_stage=2", ConfigCompositionException, "llm_stage"),
        ("trainer.max_steps=abc", ConfigCompositionException, "max_steps=abc"),
        ("data.global_batch_size=2.5", ConfigCompositionException, "global_batch_size"),
        ("nonsense=1", ConfigCompositionException, "nonsense"),
        ("model=huge", MissingConfigException, "huge"),
    ],
)
def test_a_wrong_name_or_type_is_refused(override, kind, message, composed):
    with pytest.raises(kind, match=message) as caught:
        composed(override)
    text = str(explain(caught.value, program="p", options=known_names(), reference="d"))
    assert message in text
    assert "Remedy: " in text
    assert "\n" not in text


def test_hydras_errors_are_told_in_one_line(composed):
    def told(override):
        with pytest.raises(HydraException) as caught:
            composed(override)
        error = explain(caught.value, program="p", options=known_names(), reference="d")
        return str(error)

    look = "`p --help` lists all options, d tells their meaning."
    assert told("strategy.llm_stage=2") == (
        "There is no option 'strategy.llm_stage'. Remedy: the nearest is strategy.llm_stages; "
        + look
    )
    assert told("trainer.max_steps=abc") == (
        "trainer.max_steps=abc: Value 'abc' of type 'str' could not be converted to Integer. "
        "Remedy: " + look
    )
    assert told("model=tiny_vln") == (
        "model=tiny_vln: there is no such choice. Limit: one of nano_vlm, tiny_vlm. "
        "Remedy: the nearest is model=tiny_vlm."
    )
    assert told("a b=[") == (
        "'a b=[' cannot be read. Limit: NAME=VALUE. Remedy: quote values with spaces, commas or "
        "brackets: 'NAME=\"VALUE\"'."
    )


SCHEMAS = [(f"{g}/{n}", schema) for g, group in GROUPS.items() for n, schema in group.items()]
# Parameters that the app sets itself, or that only code can give.
NOT_OPTIONS = {
    "data/planned": {"tokenizer"},
    "model/tiny_vlm": {"vocab_size", "image_token_id"},
    "strategy/entrain": {
        "accelerator",
        "parallel_devices",
        "cluster_environment",
        "checkpoint_io",
        "precision_plugin",
    },
    "module": {"model", "betas", "eps"},
}


# Callbacks are left out: not all of Lightning's own parameters are offered.
@pytest.mark.parametrize(
    ("name", "schema"),
    [*(s for s in SCHEMAS if not s[0].startswith("callbacks/")), ("module", ModuleConf)],
)
def test_options_are_the_parameters_of_what_they_build(name, schema):
    target = get_object(schema()._target_)
    parameters = inspect.signature(target).parameters
    known = {field.name for field in dataclasses.fields(schema)} - {"_target_"}
    assert known == set(parameters) - NOT_OPTIONS.get(name, set())


def test_schedules_offered_are_those_that_exist():
    (field,) = (f for f in dataclasses.fields(EntrainStrategyConf) if f.name == "schedule")
    assert field.metadata["choices"] == (AUTO, *SCHEDULES)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("strategy.llm_stage", "strategy.llm_stages"),
        ("modle", "model"),
        ("learning_rate", "module.learning_rate"),
        ("batch_size", "data.global_batch_size"),
        ("qqqqqq", None),
    ],
)
def test_near_names_are_suggested(wrong, right):
    assert nearest(wrong, known_names()) == right


def test_further_trainer_arguments_can_be_given(composed):
    config = composed("+trainer.extra.limit_train_batches=3", *IN_MEMORY, "strategy=single")
    assert build_trainer(config, 1).limit_train_batches == 3


def test_without_loggers_and_callbacks_nothing_is_written(composed, tmp_path):
    config = composed(*IN_MEMORY, "strategy=single", "logger=none", "callbacks=none")
    trainer = build_trainer(config, 1)
    assert trainer.loggers == []
    assert trainer.checkpoint_callback is None
    assert not any(isinstance(logger, StepCSVLogger) for logger in trainer.loggers)


def test_the_options_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference_markdown(), (
        "run: python -m lightning_entrain.config_reference > docs/configuration.md"
    )


def test_the_options_page_tells_what_every_choice_sets(composed):
    listed = {f"{choice.group}={choice.name}": choice for choice in choices()}
    assert sorted(listed) == sorted(CHOICES)
    assert "data.max_pixels=100352" in listed["data=charts"].sets
    assert {name for name, choice in listed.items() if choice.is_default} >= {"data=charts"}
    for name, choice in listed.items():
        assert re.fullmatch(r"[A-Z].*\.", choice.about), name
        config = composed(name)
        for text in choice.sets:
            option, _, value = text.partition("=")
            if option in GROUP_NAMES:  # another group's choice
                assert config == composed(name, text)
            else:
                assert str(OmegaConf.select(config, option)) == value


@pytest.mark.parametrize("name", ["tiny_vlm", "nano_vlm"])
def test_the_planner_knows_the_models_that_are_trained(name, composed):
    trained = instantiate(composed(f"model={name}").model, vocab_size=1024)
    planned = model_shape(
        OmegaConf.to_container(OmegaConf.load(conf_dir() / "planning" / "model" / f"{name}.yaml"))
    )
    found = shape_of_model(trained)
    assert (found.encoder.blocks, found.llm.blocks) == (planned.encoder.blocks, planned.llm.blocks)
    assert found.num_parameters == planned.num_parameters


def test_every_option_has_a_meaning():
    options = [option for section in sections() for option in section.options]
    assert len(options) > 60
    for option in options:
        assert option.meaning.endswith("."), option.name


def test_the_help_names_every_choice():
    text = (conf_dir() / "train.yaml").read_text()
    for group in GROUP_NAMES:
        names = sorted(path.stem for path in (conf_dir() / group).iterdir())
        found = re.search(rf"^        {group}=(.*)$", text, re.M)
        assert sorted(found.group(1).split(", ")) == names


def test_every_schema_is_used_by_a_shipped_config():
    text = "".join(path.read_text() for path in conf_dir().rglob("*.yaml"))
    for group, schemas in GROUPS.items():
        for name in schemas:
            assert re.search(rf"/schema/{group}@\w+: {name}$", text, re.M), f"{group}/{name}"
