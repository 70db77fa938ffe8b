import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
)

from rlhf_stages.args import ModelArgs
from rlhf_stages.data.tokenizer import load_tokenizer
from rlhf_stages.models.loading import (
    disable_dropout,
    load_causal,
    load_scalar,
    parameter_summary,
    prepare_training,
    quiet,
    save_model,
)

from helpers import (
    ENCODERS,
    KINDS,
    make_config,
    make_tokenizer,
    save_causal,
    save_classifier,
    save_encoder,
    shake_adapters,
)

IDS = torch.tensor([[1, 5, 6, 7, 8, 9, 2]])
MASK = torch.ones_like(IDS, dtype=torch.bool)
LORA = ModelArgs(finetune_mode="lora", lora_rank=4, lora_alpha=8)
MODES = {"all": ModelArgs(), "last_layer": ModelArgs(finetune_mode="last_layer"), "lora": LORA}


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def nudge(model):
    """Change what trains, as a step would."""
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return shake_adapters(model).eval()


# Loading


def test_weights_are_fp32_whatever_the_checkpoint_holds(tmp_path, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(save_causal(tmp_path), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "half")
    assert {p.dtype for p in load_causal(tmp_path / "half", tokenizer, ModelArgs()).parameters()} == {torch.float32}
    scalar = load_scalar(tmp_path / "half", tokenizer, ModelArgs(), trained_head=False)
    assert {p.dtype for p in scalar.parameters()} == {torch.float32}


def test_a_hostile_generation_config_is_left_behind(tmp_path, tokenizer):
    folder = save_causal(tmp_path, generation_config={"repetition_penalty": 1.5, "top_k": 3, "eos_token_id": 9})
    config = load_causal(folder, tokenizer, ModelArgs()).generation_config
    assert (config.repetition_penalty, config.top_k, config.eos_token_id) == (None, None, 2)


def test_new_head_has_variance_one_over_width_plus_one(tmp_path, tokenizer):
    folder = save_causal(tmp_path, "llama", hidden_size=1024, intermediate_size=8, num_hidden_layers=1)
    torch.manual_seed(3)
    head = load_scalar(folder, tokenizer, ModelArgs(), trained_head=False).hf.score
    assert head.bias is None
    assert head.weight.shape == (1, 1024)
    # 1 / sqrt(1025) = 0.031235; the standard error of a deviation from 1024 draws is 2.2 %
    assert head.weight.std().item() == pytest.approx(0.031235, rel=0.07)


def test_the_trunk_of_a_new_reward_model_is_that_of_the_causal_model(tmp_path, tokenizer):
    causal = load_causal(save_causal(tmp_path, "neox"), tokenizer, ModelArgs())
    scalar = load_scalar(tmp_path, tokenizer, ModelArgs(), trained_head=False)
    for name, weight in causal.gpt_neox.state_dict().items():
        assert torch.equal(weight, scalar.hf.gpt_neox.state_dict()[name]), name


def test_a_reward_model_without_its_head(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"has no trained reward head \(score\.weight\)"):
        load_scalar(save_causal(tmp_path), tokenizer, ModelArgs(), trained_head=True)


def test_a_reward_model_is_no_policy(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="GPT2ForSequenceClassification, which scores texts; expected a causal"):
        load_causal(save_classifier(tmp_path), tokenizer, ModelArgs())


def test_a_classifier_of_two_labels_is_no_reward_model(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"another shape than config\.json says, among them 'score\.weight'"):
        load_scalar(save_classifier(tmp_path, num_labels=2), tokenizer, ModelArgs(), trained_head=True)


def test_an_architecture_with_another_kind_of_head(tmp_path, tokenizer):
    from transformers import BartConfig, BartForSequenceClassification

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 1, "decoder_attention_heads": 1, "num_labels": 1}
    BartForSequenceClassification(BartConfig(vocab_size=100, d_model=8, **sizes, **heads)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="BartForSequenceClassification has no linear `score` head"):
        load_scalar(tmp_path, tokenizer, ModelArgs(), trained_head=True)


# Encoders


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_that_was_never_taught_to_classify(tmp_path, kind, tokenizer):
    folder = save_encoder(tmp_path, kind)
    scalar = load_scalar(folder, tokenizer, ModelArgs(), trained_head=False)
    stored = load_file(folder / "model.safetensors")
    trunk = {f"hf.{name}": weight for name, weight in stored.items() if name.startswith(f"{kind}.")}
    weights = scalar.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in trunk.items())
    assert {name.split(".")[-3] for name in weights if name not in trunk} <= {"hf", "pooler", "classifier"}
    assert {parameter.dtype for parameter in scalar.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match=r"has no trained reward head \((classifier|bert\.pooler)\."):
        load_scalar(folder, tokenizer, ModelArgs(), trained_head=True)


def test_a_new_head_of_an_encoder_comes_from_the_seed(tmp_path, tokenizer):
    folder = save_encoder(tmp_path)
    heads = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        heads.append(load_scalar(folder, tokenizer, ModelArgs(), trained_head=False).hf.classifier.weight)
    assert torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[0], heads[2])


def test_damaged_encoders_are_refused(tmp_path, tokenizer):
    folder = save_classifier(tmp_path, "bert")
    file = folder / "model.safetensors"
    stored = {name: tensor.clone() for name, tensor in load_file(file).items()}
    for lost, trained_head, message in (
        ("bert.encoder.layer.1.output.dense.weight", False, "1 weights are missing .* 'bert.encoder.layer.1"),
        ("classifier.weight", True, r"no trained reward head \(classifier\.weight\)"),
        ("bert.pooler.dense.bias", True, r"no trained reward head \(bert\.pooler\.dense\.bias\)"),
    ):
        save_file({name: t for name, t in stored.items() if name != lost}, file, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            load_scalar(folder, tokenizer, ModelArgs(), trained_head=trained_head)
    with pytest.raises(ValueError, match=r"another shape than config\.json says, among them 'classifier\."):
        load_scalar(save_classifier(tmp_path, "bert", num_labels=2), tokenizer, ModelArgs(), trained_head=True)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_gives_no_token_scores(tmp_path, kind, tokenizer):
    folder = save_classifier(tmp_path, kind)
    with pytest.raises(ValueError, match=r"is an encoder, .*--loss_type=last_token; .*give PPO --critic_init=sft"):
        load_scalar(folder, tokenizer, ModelArgs(), trained_head=True, token_scores=True)
    load_scalar(save_classifier(folder), tokenizer, ModelArgs(), trained_head=True, token_scores=True)


@torch.no_grad()
def test_an_encoder_keeps_its_own_padding_id(tmp_path, tokenizer):
    """RoBERTa counts its positions from it, so another one in the saved config would give other scores."""
    folder = save_classifier(tmp_path / "a", "roberta", pad_token_id=1, bos_token_id=0)
    scalar = load_scalar(folder, tokenizer, ModelArgs(), trained_head=True).eval()
    save_model(scalar, tokenizer, tmp_path / "b")
    again = load_scalar(tmp_path / "b", tokenizer, ModelArgs(), trained_head=True).eval()
    assert torch.equal(again(IDS, MASK), scalar(IDS, MASK))


@torch.no_grad()
def test_an_encoder_whose_classifier_follows_another_layer(tmp_path, tokenizer):
    """DistilBERT has no pooler but a layer outside of its trunk before the classifier."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(vocab_size=100, dim=8, n_layers=1, n_heads=1, hidden_dim=8, max_position_embeddings=16)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path / "a")
    scalar = load_scalar(tmp_path / "a", tokenizer, ModelArgs(), trained_head=False).eval()
    save_model(scalar, tokenizer, tmp_path / "b")
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "b").eval()
    torch.testing.assert_close(scalar(IDS, MASK)[0, -1:], classifier(IDS).logits[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("load", [load_causal, lambda *args: load_scalar(*args, trained_head=False)])
def test_damaged_folders_are_one_line(tmp_path, tokenizer, load):
    folder = save_causal(tmp_path / "model")
    weights, config = folder / "model.safetensors", folder / "config.json"

    def refused(match):
        with pytest.raises(ValueError, match=match) as caught:
            load(folder, tokenizer, ModelArgs())
        assert "\n" not in str(caught.value)
        assert str(folder) in str(caught.value)

    content = weights.read_bytes()
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # not mapped to the file
    weights.write_bytes(content[: len(content) // 2])
    refused("no model could be loaded")
    renamed = {name.replace("h.1.", "layer.1."): tensor for name, tensor in tensors.items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    refused(r"12 weights are missing .* 'transformer\.h\.1\.")
    name = "transformer.h.0.attn.c_attn.weight"
    save_file({**tensors, name: tensors[name][:, :12].contiguous()}, weights, metadata={"format": "pt"})
    refused(rf"1 weights .* another shape .* '{name}'")
    weights.unlink()
    refused("no model could be loaded")
    config.write_text("{")
    refused("no model could be loaded")


def test_an_unknown_path_is_one_line(tokenizer, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for load in (load_causal, lambda *args: load_scalar(*args, trained_head=True)):
        with pytest.raises(ValueError, match="no model could be loaded from '/no/such/folder'") as caught:
            load("/no/such/folder", tokenizer, ModelArgs())
        assert "\n" not in str(caught.value)


# Embedding


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_embedding_grows_for_a_new_padding_token(tmp_path, kind):
    save_causal(tmp_path, kind, tokenizer=make_tokenizer(pad_token=None, unk_token=None, bos_token="<unk>"))
    (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text().replace("<pad>", "<other>"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert (tokenizer.pad_token, tokenizer.pad_token_id, len(tokenizer)) == ("<|pad|>", 100, 101)
    before = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = load_causal(tmp_path, tokenizer, ModelArgs()).eval()
    rows = model.get_input_embeddings().weight
    assert rows.shape[0] == model.config.vocab_size == 101
    assert torch.equal(rows[:100], before.get_input_embeddings().weight)
    torch.testing.assert_close(rows[100], rows[:100].mean(0), rtol=0, atol=1e-3)
    torch.testing.assert_close(model(IDS).logits[..., :100], before.eval()(IDS).logits)

    for saved in (model, load_scalar(tmp_path, tokenizer, ModelArgs(), trained_head=False)):
        save_model(saved, tokenizer, tmp_path / "grown")
        config = json.loads((tmp_path / "grown" / "config.json").read_text())
        assert (config["vocab_size"], config["pad_token_id"], config["eos_token_id"]) == (101, 100, 2)
        again = load_tokenizer(str(tmp_path / "grown"))
        assert (len(again), again.pad_token_id) == (101, 100)
        if saved is model:
            reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "grown").eval()
            assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_embedding_never_shrinks(tmp_path, kind, tokenizer):
    folder = save_causal(tmp_path, kind, vocab_size=128)  # spare rows, as many models have
    model = load_causal(folder, tokenizer, ModelArgs())
    scalar = load_scalar(folder, tokenizer, ModelArgs(), trained_head=False)
    for hf in (model, scalar.hf):
        assert hf.get_input_embeddings().num_embeddings == hf.config.vocab_size == 128
    save_model(model, tokenizer, tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["vocab_size"] == 128
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "saved").get_input_embeddings().num_embeddings == 128


# Dropout


@pytest.mark.parametrize(("kind", "rate"), [("gpt2", 0.1), ("opt", 0.5), ("llama", 0.5), ("neox", 0.1)])
@torch.no_grad()
def test_disable_dropout_makes_two_training_forwards_bit_equal(tmp_path, kind, rate, tokenizer):
    folder = save_causal(tmp_path, kind, dropout=rate)
    noisy = load_causal(folder, tokenizer, ModelArgs()).train()
    assert not torch.equal(noisy(IDS).logits, noisy(IDS).logits)
    args = ModelArgs(disable_dropout=True)
    model = load_causal(folder, tokenizer, args).train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert torch.equal(model(IDS).logits, noisy.eval()(IDS).logits)
    scalar = load_scalar(folder, tokenizer, args, trained_head=False).train()
    assert torch.equal(scalar(IDS, MASK), scalar(IDS, MASK))

    rates = {name: value for name, value in make_config(kind, dropout=rate).to_dict().items() if "drop" in name}
    assert rate in rates.values()
    save_model(model, tokenizer, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: saved[name] for name in rates if name in saved} == {n: rates[n] for n in rates if n in saved}
    assert rate in [saved.get(name) for name in rates]


@pytest.mark.parametrize("kind", ENCODERS)
@torch.no_grad()
def test_disable_dropout_of_an_encoder(tmp_path, kind, tokenizer):
    folder = save_classifier(tmp_path, kind, dropout=0.5)
    noisy = load_scalar(folder, tokenizer, ModelArgs(), trained_head=True).train()
    assert not torch.equal(noisy(IDS, MASK), noisy(IDS, MASK))
    model = load_scalar(folder, tokenizer, ModelArgs(disable_dropout=True), trained_head=True).train()
    assert torch.equal(model(IDS, MASK), noisy.eval()(IDS, MASK))


@pytest.mark.parametrize(
    ("model_class", "config"),
    [
        (
            FalconForCausalLM,
            FalconConfig(
                vocab_size=100, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, attention_dropout=0.5,
                hidden_dropout=0.5, bos_token_id=1, eos_token_id=2,
            ),
        ),
        (
            GPTNeoForCausalLM,
            GPTNeoConfig(
                vocab_size=100, hidden_size=16, num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]],
                attention_dropout=0.5, embed_dropout=0.5, resid_dropout=0.5, bos_token_id=1, eos_token_id=2,
            ),
        ),
    ],
)  # fmt: skip
@torch.no_grad()
def test_disable_dropout_reaches_layers_that_ask_the_config(model_class, config):
    model = model_class(config).train()
    before = model.config.to_dict()
    disable_dropout(model)
    assert torch.equal(model(IDS).logits, model(IDS).logits)
    assert model.config.to_dict() == before


@torch.no_grad()
def test_disable_dropout_covers_adapters(tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", lora_dropout=0.5, disable_dropout=True)
    model = shake_adapters(prepare_training(load_causal(save_causal(tmp_path), tokenizer, args), args)).train()
    assert torch.equal(model(IDS).logits, model(IDS).logits)


# What trains


@pytest.mark.parametrize("kind", KINDS)
def test_all_trains_every_weight(tmp_path, kind, tokenizer):
    model = prepare_training(load_causal(save_causal(tmp_path, kind), tokenizer, ModelArgs()), ModelArgs())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(
    ("kind", "changes", "name"),
    [
        ("gpt2", {}, "transformer.wte.weight"),  # tied: the output layer is the input embedding
        ("llama", {}, "model.embed_tokens.weight"),
        ("llama", {"tie_word_embeddings": False}, "lm_head.weight"),
        ("opt", {}, "model.decoder.embed_tokens.weight"),
    ],
)
def test_last_layer_trains_the_output_embedding_alone(tmp_path, kind, changes, name, tokenizer):
    args = MODES["last_layer"]
    model = prepare_training(load_causal(save_causal(tmp_path, kind, **changes), tokenizer, args), args)
    assert trained(model) == {name}


@pytest.mark.parametrize(("kind", "layers"), [("bert", {""}), ("roberta", {"dense.", "out_proj."})])
def test_last_layer_of_an_encoder_is_its_classifier(tmp_path, kind, layers, tokenizer):
    args = MODES["last_layer"]
    model = prepare_training(load_scalar(save_encoder(tmp_path, kind), tokenizer, args, trained_head=False), args)
    assert trained(model) == {f"hf.classifier.{layer}{part}" for layer in layers for part in ("weight", "bias")}


@pytest.mark.parametrize("kind", KINDS)
def test_last_layer_of_a_reward_model_is_its_head(tmp_path, kind, tokenizer):
    args = MODES["last_layer"]
    model = prepare_training(load_scalar(save_causal(tmp_path, kind), tokenizer, args, trained_head=False), args)
    assert trained(model) == {"hf.score.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_lora_trains_adapters_and_a_reward_models_head(tmp_path, kind, tokenizer):
    folder = save_causal(tmp_path, kind)
    model = prepare_training(load_causal(folder, tokenizer, LORA), LORA)
    assert trained(model)
    assert all("lora_" in name for name in trained(model))
    scalar = prepare_training(load_scalar(folder, tokenizer, LORA, trained_head=False), LORA)
    others = [name for name in trained(scalar) if "lora_" not in name]
    assert len(others) == 1
    assert "score" in others[0]
    scalar(IDS, MASK).sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for n, p in scalar.named_parameters() if "lora_B" in n)


def test_lora_targets_by_name(tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", lora_targets="('q_proj','v_proj')")
    model = prepare_training(load_causal(save_causal(tmp_path, "llama"), tokenizer, args), args)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in trained(model)} == {"q_proj", "v_proj"}


def test_adapters_come_without_a_warning(tmp_path, tokenizer):
    model = load_causal(save_causal(tmp_path, "llama"), tokenizer, LORA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare_training(model, LORA)


def test_lora_targets_that_are_not_there(tmp_path, tokenizer):
    args = ModelArgs(finetune_mode="lora", lora_targets="nowhere")
    with pytest.raises(ValueError, match=r"--lora_targets=nowhere: Target modules .*nowhere.* not found"):
        prepare_training(load_causal(save_causal(tmp_path), tokenizer, args), args)


def test_summary_counts_by_hand(tmp_path, tokenizer):
    args = MODES["last_layer"]
    model = prepare_training(load_scalar(save_causal(tmp_path), tokenizer, args, trained_head=False), args)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_summary(model) == (
        f"trainable 16 float32 · frozen {total - 16:,} float32 · {16 / total:.2%} trainable"
    )


# Saving


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("gpt2", mode) for mode in MODES), ("opt", "lora"), ("opt", "all"), ("llama", "lora"), ("neox", "lora")],
)
@torch.no_grad()
def test_a_saved_policy_gives_the_same_logits(tmp_path, kind, mode, tokenizer):
    folder = save_causal(tmp_path / "base", kind)
    model = nudge(prepare_training(load_causal(folder, tokenizer, MODES[mode]), MODES[mode]))
    before = load_causal(folder, tokenizer, ModelArgs()).eval()
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_model(model, tokenizer, tmp_path / "saved")
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())  # saving only reads

    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())  # strict: no key is missing, unexpected or of another shape
    logits = model(input_ids=IDS, attention_mask=MASK).logits
    torch.testing.assert_close(loaded.eval()(IDS).logits, logits, rtol=0, atol=1e-5)
    if mode != "lora":
        assert all(torch.equal(weight, weights[name]) for name, weight in loaded.state_dict().items())
    assert (logits - before(IDS).logits).abs().max() > 0.01
    assert (tmp_path / "saved" / "adapter").is_dir() == (mode == "lora")
    assert (tmp_path / "saved" / "generation_config.json").is_file()


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("gpt2", mode) for mode in MODES), ("opt", "lora"), ("opt", "all"), ("llama", "lora"), ("neox", "lora")],
)
@torch.no_grad()
def test_a_saved_reward_model_gives_the_same_scores(tmp_path, kind, mode, tokenizer):
    args = MODES[mode]
    scalar = load_scalar(save_causal(tmp_path / "base", kind), tokenizer, args, trained_head=False)
    scalar = nudge(prepare_training(scalar, args))
    save_model(scalar, tokenizer, tmp_path / "saved")
    loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(info.values())
    expected = scalar(IDS, MASK)[0, -1]
    torch.testing.assert_close(loaded.eval()(IDS).logits[0, 0], expected, rtol=0, atol=2e-5)
    again = load_scalar(tmp_path / "saved", tokenizer, ModelArgs(), trained_head=True).eval()
    torch.testing.assert_close(again(IDS, MASK), scalar(IDS, MASK), rtol=0, atol=2e-5)
    if mode != "lora":
        weights = scalar.state_dict()
        assert all(torch.equal(weight, weights[name]) for name, weight in again.state_dict().items())


@pytest.mark.parametrize("kind", ENCODERS)
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_encoder_gives_the_same_scores(tmp_path, kind, mode, tokenizer):
    args = MODES[mode]
    scalar = load_scalar(save_encoder(tmp_path / "base", kind), tokenizer, args, trained_head=False)
    scalar = nudge(prepare_training(scalar, args))
    scalar(IDS, MASK)[0, -1].backward()
    assert all(p.grad is not None for name, p in scalar.named_parameters() if p.requires_grad and "lora_A" not in name)
    save_model(scalar, tokenizer, tmp_path / "saved")
    with torch.no_grad():
        loaded, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", output_loading_info=True)
        assert not any(info.values())
        torch.testing.assert_close(loaded.eval()(IDS).logits[0], scalar(IDS, MASK)[0, -1:], rtol=0, atol=2e-5)
        again = load_scalar(tmp_path / "saved", tokenizer, ModelArgs(), trained_head=True).eval()
        torch.testing.assert_close(again(IDS, MASK), scalar(IDS, MASK), rtol=0, atol=2e-5)


@torch.no_grad()
def test_the_kept_adapter_loads_on_the_base_model(tmp_path, tokenizer):
    from peft import PeftModel

    folder = save_causal(tmp_path / "base", "llama")
    model = nudge(prepare_training(load_causal(folder, tokenizer, LORA), LORA))
    save_model(model, tokenizer, tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(folder)
    adapted = PeftModel.from_pretrained(base, tmp_path / "saved" / "adapter").eval()
    torch.testing.assert_close(adapted(IDS).logits, model(IDS).logits)


def test_saving_is_silent(tmp_path, tokenizer, capfd):
    model = load_causal(save_causal(tmp_path, "llama"), tokenizer, ModelArgs())
    capfd.readouterr()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet():
            save_model(model, tokenizer, tmp_path / "saved")
        load_causal(tmp_path / "saved", tokenizer, ModelArgs())
    assert capfd.readouterr() == ("", "")
