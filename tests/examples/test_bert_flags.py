"""The flags of BERT's pretraining: named configs, what goes before what, and flags that do not agree."""

import importlib.util

import pytest

TINY = ["--config", "unit_test_cpu", "--disable-progress-bar"]


def refused(bert, capsys, *argv):
    with pytest.raises(SystemExit) as refusal:
        bert.main([*TINY, *argv])
    return str(refusal.value) if refusal.value.code != 2 else capsys.readouterr().err


# ---- named configs ---------------------------------------------------------------------------------------

CONFIGS = {  # layers on each ipu; sequence, micro-batch, accumulation, replicas, global batch, steps; loss scaling
    "demo_tiny_128": ([0, 1, 1, 1], 128, 1, 16, 1, 16, 150, 16),
    "pretrain_base_128": ([0, 4, 4, 4], 128, 32, 512, 4, 65536, 7038, 16384),
    "pretrain_base_128_pod4": ([0, 4, 4, 4], 128, 32, 2048, 1, 65536, 7038, 16384),
    "pretrain_base_512": ([0, 4, 4, 4], 512, 8, 512, 4, 16384, 2137, 128),
    "pretrain_base_512_pod4": ([0, 4, 4, 4], 512, 8, 2048, 1, 16384, 2137, 128),
    "pretrain_large_128": ([3, 7, 7, 7], 128, 8, 2048, 4, 65536, 7038, 4096),
    "pretrain_large_128_pod4": ([3, 7, 7, 7], 128, 8, 8192, 1, 65536, 7038, 4096),
    "pretrain_large_128_POD64": ([3, 7, 7, 7], 128, 8, 512, 16, 65536, 7038, 32768),
    "pretrain_large_128_ALS": ([3, 7, 7, 7], 128, 8, 2048, 4, 65536, 7038, 1),
    "pretrain_large_128_POD64_ALS": ([3, 7, 7, 7], 128, 8, 512, 16, 65536, 7038, 1),
    "pretrain_large_512": ([3, 7, 7, 7], 512, 2, 2048, 4, 16384, 2137, 8192),
    "pretrain_large_512_pod4": ([3, 7, 7, 7], 512, 2, 8192, 1, 16384, 2137, 8192),
    "pretrain_large_512_POD64": ([3, 7, 7, 7], 512, 2, 512, 16, 16384, 2137, 16384),
    "pretrain_base_3L_128_single": ([0, 1, 1, 1], 128, 8, 128, 1, 1024, 150, 16),
    "unit_test": ([0, 1, 1, 1], 128, 1, 16, 1, 16, 10, 16),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_named_configs_are_those_of_the_original(bert, name):
    flags = bert.arguments.parse_arguments(["--config", name.lower()])
    assert flags.config == name
    batch = flags.micro_batch_size * flags.gradient_accumulation * flags.replication_factor
    found = (flags.layers_per_ipu, flags.sequence_length, flags.micro_batch_size, flags.gradient_accumulation)
    found = (*found, flags.replication_factor, batch, flags.training_steps, flags.loss_scaling)
    assert found == CONFIGS[name]
    large, half = "large" in name, flags.precision == "16.16"
    assert (
        half and flags.hidden_dropout_prob == 0.1 and flags.layer_norm_eps == 0.001 and flags.random_seed == 5
    )
    if "pretrain" in name:
        assert flags.optimizer == ("LAMB" if large else "LAMBNoBiasCorrection")
        assert (flags.lr_schedule, flags.weight_decay, flags.replicated_tensor_sharding) == (
            "linear",
            0.01,
            True,
        )
        assert (flags.hidden_size, flags.num_attention_heads) == ((1024, 16) if large else (768, 12))
    if "3L" not in name and "pretrain" in name:
        phase = {128: (0.006, 0.28, 20), 512: (0.002828, 0.128, 76)}[flags.sequence_length]
        assert (flags.learning_rate, flags.lr_warmup, flags.mask_tokens) == phase
        factor = 6 if "POD64_ALS" in name else 2 if large or flags.sequence_length == 512 else 1
        assert flags.embedding_serialization_factor == factor


def test_the_command_line_goes_before_the_config_and_minus_one_shares_the_rest(bert):
    words = "--config pretrain_base_128 --layers-per-ipu 1 -1 -1 -1 --packed-data --lr-w 0.5"
    flags = bert.arguments.parse_arguments(words.split())
    assert flags.layers_per_ipu == [1, 3, 4, 4]
    assert flags.gradient_accumulation == 438  # 512 / 1.17, rounded up
    assert flags.lr_warmup == 0.5
    one = bert.arguments.parse_arguments(["--config", "pretrain_base_128", "--layers-per-ipu", "3"])
    assert one.layers_per_ipu == [3, 3, 3, 3]


@pytest.mark.parametrize(
    ("text", "value"), [("", True), ("true", True), ("False", False), ("0", False), ("Y", True)]
)
def test_booleans_are_flags_with_or_without_a_value(bert, text, value):
    words = [*TINY, "--packing-factor", "1.1", "--packed-data", *([text] if text else [])]
    assert bert.arguments.parse_arguments(words).packed_data is value


def test_an_unknown_key_of_a_config_is_an_error(bert, capsys, tmp_path, monkeypatch):
    file = tmp_path / "configs.yml"
    file.write_text("mine: {learning_rat: 1.0}\n")
    monkeypatch.setattr(bert.arguments, "CONFIGS", file)
    said = refused(bert, capsys, "--config", "mine")
    assert "config 'mine' has an unknown key 'learning_rat'; near it: learning_rate" in said


def test_the_help_begins_as_the_originals(bert, capsys):
    assert refused(bert, capsys, "--help") == "0"
    assert capsys.readouterr().out.startswith("usage: PopTorch BERT [-h]")


# ---- bad input -------------------------------------------------------------------------------------------


CONTRADICTIONS = {
    "--layers-per-ipu 1 1": "layers_per_ipu names 2 ipus: --layers-per-ipu 1 1 (command line), "
    "--ipus-per-replica 3 (config 'unit_test_cpu')",
    "--matmul-proportion 0.1 0.2": "matmul_proportion must be one number, or one for each ipu: "
    "--matmul-proportion 0.1 0.2 (command line), --ipus-per-replica 3 (config 'unit_test_cpu')",
    "--gradient-accumulation 6": "this pipeline needs at least 7 micro-batches: --gradient-accumulation 6",
    "--embedding-serialization-factor 3": "the factor must divide the vocabulary: "
    "--embedding-serialization-factor 3 (command line), --vocab-size 512",
    "--resume-training-from-checkpoint": "there is nothing to resume from: "
    "--resume-training-from-checkpoint True (command line), --checkpoint-input-dir  (default)",
    "--intermediate-size 100": "intermediate_size is always 4 x hidden_size: --intermediate-size 100",
    "--num-attention-heads 5": "the heads must divide the hidden size: --hidden-size 32 (config 'unit_test_cpu'), "
    "--num-attention-heads 5 (command line)",
    "--sequence-length 513": "there are 512 positions: --sequence-length 513",
    "--mask-tokens 32": "a row has fewer pieces: --mask-tokens 32 (command line), --sequence-length 32",
    "--held-out-files a.npz": "held-out files need samples to train on: --held-out-files a.npz (command line), "
    "--dataset generated",
    "--packed-data perhaps": "'perhaps' is not a valid boolean value",
    "--layers-per-ipu 0 1 2": "layers_per_ipu not compatible with number of hidden layers",
    "--packed-data": "no packing factor is known for --sequence-length 32 (config 'unit_test_cpu')",
}


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_flags_that_contradict_each_other_are_named_with_their_origin(bert, capsys, words):
    assert CONTRADICTIONS[words] in refused(bert, capsys, *words.split())


def test_all_contradictions_are_said_at_once(bert, capsys):
    said = refused(bert, capsys, "--layers-per-ipu", "1", "1", "--sequence-length", "513")
    assert "flags do not agree\n  layers_per_ipu names" in said and "\n  there are 512 positions" in said


def test_a_mistyped_config_is_answered_with_near_names(bert, capsys):
    said = refused(bert, capsys, "--config", "pretrain_large_128_pod46")
    assert "no config 'pretrain_large_128_pod46'" in said
    assert "pretrain_large_128_pod4" in said


@pytest.mark.skipif(importlib.util.find_spec("wandb") is not None, reason="wandb is installed")
def test_wandb_without_its_package_is_an_error_that_says_so(bert, capsys):
    assert "--wandb needs the package wandb" in refused(bert, capsys, "--wandb")


def test_compile_only_compiles_and_ends(bert, caplog):
    tracker = bert.main([*TINY, "--compile-only", "--precision", "16.16", "--auto-loss-scaling"])
    assert tracker.steps == []
    assert caplog.messages[-1] == "The model is compiled; --compile-only was given, so nothing is trained"


def test_synthetic_data_measures_time_alone(bert):
    tracker = bert.main([*TINY, "--synthetic-data", "--training-steps", "2"])
    assert len(tracker.steps) == 2 and tracker.steps[1]["throughput"] > 0
