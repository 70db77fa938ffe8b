import json
import threading
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from rlhf_stages.args import DailyDialogArgs, GenerationArgs
from rlhf_stages.chat import ChatSession
from rlhf_stages.data.daily_dialog import Dialogues, chat_template, to_example
from rlhf_stages.data.dialogue import CHAT_TEMPLATE
from rlhf_stages.data.prepare import prepare
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.sources import Source
from rlhf_stages.data.tokenizer import load_tokenizer, separator_id

# The tokenizer: three special tokens, then one token per byte. No merges, so that a text has as many ids as bytes.
SPECIAL = ["<s>", "</s>", "<pad>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
VOCABULARY = {token: i for i, token in enumerate([*SPECIAL, *ALPHABET])}
GREEDY = GenerationArgs(do_sample=False, max_new_tokens=24)


def byte_tokenizer(template=CHAT_TEMPLATE):
    backend = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.chat_template = template
    return tokenizer


def ids_of(text):
    """Ids of an ASCII text, looked up one by one: byte-level BPE writes space as Ġ and newline as Ċ."""
    return [VOCABULARY[{" ": "Ġ", "\n": "Ċ"}.get(character, character)] for character in text]


def text_of(ids):
    return "".join({"Ġ": " ", "Ċ": "\n"}.get(c, c) for c in ([*SPECIAL, *ALPHABET][i] for i in ids))


def tiny_llama(window=256, **kwargs):
    """Random weights; the output layer only knows letters, so that greedy text is readable and never ends by itself."""
    config = LlamaConfig(
        vocab_size=len(VOCABULARY), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=window, initializer_range=1.0, bos_token_id=0, eos_token_id=1, pad_token_id=2, **kwargs,
    )  # fmt: skip
    return only_letters(LlamaForCausalLM(config))


def tiny_gpt2(window=256):
    config = GPT2Config(
        vocab_size=len(VOCABULARY), n_embd=16, n_layer=2, n_head=2, n_positions=window, initializer_range=1.0,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return only_letters(GPT2LMHeadModel(config))


def only_letters(model):
    letters = torch.zeros(len(VOCABULARY), dtype=torch.bool)
    letters[ids_of("abcdefghijklmnopqrstuvwxyz")] = True
    with torch.no_grad():
        model.lm_head.weight[~letters] = 0.0
    return model.eval()


def scripted(reply_ids, *, text="hi", window=128, template=CHAT_TEMPLATE):
    """A session whose model answers the first message `text` with exactly these ids: each position dictates a token."""
    config = GPT2Config(
        vocab_size=len(VOCABULARY), n_embd=window, n_layer=1, n_head=1, n_positions=window,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(window))
        model.transformer.ln_f.weight.fill_(1.0)
        # The last token of "<s>\n\nHuman: hi\n\nAssistant:" dictates the first id of the reply.
        last = len(f"\n\nHuman: {text}\n\nAssistant:")
        for i, token in enumerate(reply_ids):
            model.lm_head.weight[token, last + i] = 1.0
    return ChatSession(model, byte_tokenizer(template))


def utf8_ids(text):
    """One id per byte of any text; bytes 0xA1 and above stand for themselves in byte-level BPE, except 0xAD."""
    return [VOCABULARY[chr(b)] if b > 0x7F else ids_of(chr(b))[0] for b in text.encode()]


def greedy(model, prompt, count):
    """Greedy decoding without generate, cache or stop."""
    ids = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.fixture(autouse=True)
def _one_thread():
    """Matrices this small gain nothing from a second thread, and wait for it when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def prompts(monkeypatch):
    """The ids of every prompt that a Llama gets to see."""
    seen = []
    generate = LlamaForCausalLM.generate

    def spy(self, ids, **kwargs):
        seen.append(ids[0].tolist())
        return generate(self, ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "generate", spy)
    return seen


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_streamed_pieces_are_the_greedy_continuation(make):
    model = make()
    expected = text_of(greedy(model, [0, *ids_of("\n\nHuman: hi there\n\nAssistant:")], 24))
    session = ChatSession(model, byte_tokenizer())
    pieces = list(session.stream("hi there", GREEDY))
    assert len(pieces) == 24
    assert "".join(pieces) == expected
    session.reset()
    assert session.reply("hi there", GREEDY) == expected


def test_sampling_settings_reach_the_sampler():
    model = tiny_llama()
    expected = text_of(greedy(model, [0, *ids_of("\n\nHuman: hi\n\nAssistant:")], 12))

    def say(seed, **settings):
        torch.manual_seed(seed)
        return ChatSession(model, byte_tokenizer()).reply("hi", GenerationArgs(max_new_tokens=12, **settings))

    assert say(1, top_k=1) == say(1, top_k=0, top_p=1e-6) == say(1, top_k=0, temperature=1e-4) == expected
    assert say(1, temperature=3.0) == say(1, temperature=3.0) != say(2, temperature=3.0)


def test_beams_are_refused():
    with pytest.raises(ValueError, match="num_beams=1"):
        ChatSession(tiny_llama(), byte_tokenizer()).reply("hi", GenerationArgs(num_beams=2))


def test_history_is_rendered_as_the_template_says(prompts):
    session = ChatSession(tiny_llama(), byte_tokenizer())
    first = session.reply("one", GREEDY)
    second = session.reply("two", GREEDY)
    assert session.history == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": second},
    ]
    opening = "\n\nHuman: one\n\nAssistant:"
    assert prompts == [
        [0, *ids_of(opening)],
        [0, *ids_of(f"{opening} {first}\n\nHuman: two\n\nAssistant:")],
    ]


def test_reset_forgets(prompts):
    session = ChatSession(tiny_llama(), byte_tokenizer())
    before = session.reply("one", GREEDY)
    session.reset()
    assert session.history == []
    assert session.reply("one", GREEDY) == before
    assert prompts[0] == prompts[1]


def test_special_tokens_that_someone_types_stay_text_in_a_plain_template(prompts):
    ChatSession(tiny_llama(), byte_tokenizer()).reply("</s>", GREEDY)
    assert prompts == [[0, *ids_of("\n\nHuman: </s>\n\nAssistant:")]]


def test_special_tokens_of_a_template_are_special(prompts):
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '</s>' }}{% endfor %}assistant:"
    session = ChatSession(tiny_llama(), byte_tokenizer(template))
    session.reply("hi", GREEDY)
    assert prompts == [[*ids_of("user:hi"), 1, *ids_of("assistant:")]]


def test_without_a_template_the_dialogue_format_is_used_and_said_once(prompts):
    session = ChatSession(tiny_llama(), byte_tokenizer(template=None), name="base")
    assert len(session.notes) == 1
    assert "base brings no chat template" in session.notes[0]
    session.reply("hi", GREEDY)
    assert prompts == [[0, *ids_of("\n\nHuman: hi\n\nAssistant:")]]
    assert ChatSession(tiny_llama(), byte_tokenizer()).notes == []


def test_a_template_that_fails_is_one_clear_error():
    with pytest.raises(ValueError, match="chat template of model fails: no users"):
        ChatSession(tiny_llama(), byte_tokenizer("{{ raise_exception('no users') }}"))


def test_the_oldest_exchanges_leave_first(prompts):
    # "<s>\n\nHuman: aaaa\n\nAssistant:" has 27 ids, " " + reply 9 more, each later exchange 26 + 9: with 8 for the
    # reply a window of 95 holds one earlier exchange (27 + 9 + 26 + 8 = 70), not two (105). It would also
    # hold one and the reply of the other (92), but no exchange is torn apart.
    session = ChatSession(tiny_llama(window=95), byte_tokenizer())
    settings = GenerationArgs(do_sample=False, max_new_tokens=8)
    replies = [session.reply(text, settings) for text in ("aaaa", "bbbb", "cccc")]
    assert [len(reply) for reply in replies] == [8, 8, 8]
    assert prompts[1] == [0, *ids_of(f"\n\nHuman: aaaa\n\nAssistant: {replies[0]}\n\nHuman: bbbb\n\nAssistant:")]
    assert prompts[2] == [0, *ids_of(f"\n\nHuman: bbbb\n\nAssistant: {replies[1]}\n\nHuman: cccc\n\nAssistant:")]
    assert len(session.history) == 6


def test_a_message_too_long_loses_its_beginning(prompts):
    session = ChatSession(tiny_llama(window=64), byte_tokenizer())
    text = "abcdefghijklmnopqrstuvwxyz" * 4
    reply = session.reply(text, GenerationArgs(do_sample=False, max_new_tokens=10))
    # 64 - 10 = 54 ids: BOS, 9 of "\n\nHuman: ", 12 of "\n\nAssistant:", and the last 32 letters.
    assert prompts == [[0, *ids_of("\n\nHuman: " + text[-32:] + "\n\nAssistant:")]]
    assert len(reply) == 10
    assert session.history[0]["content"] == text


def test_a_reply_longer_than_the_window_ends_with_it(prompts):
    session = ChatSession(tiny_llama(window=64), byte_tokenizer())
    assert len(session.reply("hi", GenerationArgs(do_sample=False, max_new_tokens=1000))) == 64 - 24
    session.reply("x" * 100, GenerationArgs(do_sample=False, max_new_tokens=1000))
    assert [len(prompt) for prompt in prompts] == [24, 32]  # half of the window is for the reply


def test_a_template_that_fills_the_window_is_refused():
    with pytest.raises(ValueError, match="chat template alone takes"):
        ChatSession(tiny_llama(window=16), byte_tokenizer()).reply("hi", GREEDY)


def test_eos_ends_the_reply():
    session = scripted([*ids_of(" Yes. "), 1, *ids_of("more")])
    assert list(session.stream("hi", GREEDY)) == ["Y", "e", "s", "."]


def test_an_empty_reply_is_a_reply():
    session = scripted([1])
    assert session.reply("hi", GREEDY) == ""
    assert session.history[1] == {"role": "assistant", "content": ""}


@pytest.mark.parametrize("marker", ["\n\nHuman:", "\n\nAssistant:"])
def test_a_new_turn_is_cut_and_never_shown(marker):
    session = scripted(ids_of(f" Sure.\n\nAnd{marker} go on"))
    pieces = list(session.stream("hi", GenerationArgs(do_sample=False, max_new_tokens=60)))
    assert "".join(pieces) == "Sure.\n\nAnd"
    assert session.history[1]["content"] == "Sure.\n\nAnd"


def test_a_new_turn_that_the_limit_cuts_short_is_not_shown_either():
    session = scripted(ids_of(" Sure.\n\nHuman: go on"))
    assert session.reply("hi", GenerationArgs(do_sample=False, max_new_tokens=12)) == "Sure."  # ends in "\n\nHuma"


def test_only_a_template_with_these_turns_cuts_them():
    template = "{{ '<s>' }}{% for m in messages %}>{{ m['content'] }}{% endfor %}=aaaaaaaaaaaaaaaaaaa"
    session = scripted([*ids_of("a\n\nHuman: b"), 1], template=template)  # its prompt is as long as the scripted one
    assert session.reply("hi", GREEDY) == "a\n\nHuman: b"


def test_characters_come_whole():
    session = scripted([*utf8_ids("ñò水"), 1])  # 2 + 2 + 3 bytes
    assert list(session.stream("hi", GREEDY)) == ["ñ", "ò", "水"]


def test_errors_of_the_generating_thread_surface(monkeypatch):
    session = ChatSession(tiny_llama(), byte_tokenizer())
    session.reply("one", GREEDY)
    history = list(session.history)
    calls = []
    forward = LlamaForCausalLM.forward

    def third_call_fails(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", third_call_fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        session.reply("two", GREEDY)
    assert session.history == history


def test_stopping_keeps_what_was_said():
    session = ChatSession(tiny_llama(window=4096), byte_tokenizer())
    threads = threading.active_count()
    pieces = session.stream("one", GenerationArgs(do_sample=False, max_new_tokens=4000))
    said = next(pieces) + next(pieces)
    pieces.close()
    assert threading.active_count() == threads
    assert session.history == [{"role": "user", "content": "one"}, {"role": "assistant", "content": said}]
    assert len(session.reply("two", GREEDY)) == 24


# --- dialogues whose turns only a separator parts ---

UTTERANCES = [
    "Hi, Bob.", "Hello there! How are you?", "Fine... and you", "I don't know: 7:30, 答案?", '"Really"?', "OK", "Bye.",
]  # fmt: skip


def bytes_bpe():
    """A byte-level BPE with merges, like GPT-2's; it has no BOS."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    backend.train_from_iterator([*UTTERANCES, "\n".join(UTTERANCES)] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def merging_bpe():
    """Takes punctuation and the line breaks after it as one piece, as the tokenizers of Llama 3 and Qwen do."""
    backend = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(r" ?[^\s\p{L}\p{N}]+[\r\n]*|[^\r\n\p{L}\p{N}]?\p{L}+|\s+"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator(["word.\nWord? |Word!\nWord\nword |word |Word"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def test_a_line_break_that_merges_with_a_full_stop_is_no_separator():
    tokenizer = merging_bpe()
    with pytest.raises(ValueError, match=r"--turn_separator '\\n' is not one token .*; pass ' \|'"):
        separator_id(tokenizer, "\n")
    assert tokenizer.decode([separator_id(tokenizer, " |")]) == " |"


def talking(tokenizer, window=512):
    """A session on a tiny model with that tokenizer; nothing but its prompts counts."""
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=window, initializer_range=1.0,
    )  # fmt: skip
    return ChatSession(LlamaForCausalLM(config), tokenizer)


@pytest.mark.parametrize(("name", "separator"), [("stories260K", "\n"), ("bytes", "\n"), ("merging", " |")])
def test_chat_makes_the_ids_of_the_shards(name, separator, shared_data, tmp_path, prompts):
    makers = {"bytes": bytes_bpe, "merging": merging_bpe}
    source = makers[name]() if name in makers else load_tokenizer(str(shared_data / "models" / name))
    source.save_pretrained(tmp_path / "tokenizer")
    args = DailyDialogArgs(
        destination_dir=str(tmp_path / "data"), tokenizer_name=str(tmp_path / "tokenizer"), num_workers=1,
        shuffle=False, turn_separator=separator,
    )  # fmt: skip
    count = len(UTTERANCES) + 1
    row = {"dialog": [*UTTERANCES, "End."], "act": [1] * count, "emotion": [0] * count}
    other = [{"dialog": [split, "x"], "act": [1] * 2, "emotion": [0] * 2} for split in ("validation", "test")]
    parts = [(s, s, lambda rows=r: rows) for s, r in (("train", [row]), ("validation", other[:1]), ("test", other[1:]))]
    dialogues = Dialogues(Source(parts), args)
    template = chat_template(separator, args.context_turns)
    prepare(
        args, dataset="x", records=dialogues, to_example=to_example, example_prompt=f"Hi.{separator}",
        chat_template=template, separator=separator,
    )  # fmt: skip
    shard = [record.prompt.tolist() for record in open_shard(tmp_path / "data/finetune_train.pt")]
    assert len(shard) == 7
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer"))
    tokenizer.chat_template = template
    session = talking(tokenizer)
    assert session.notes == []
    for place in range(1, 8):
        roles = ("user", "assistant") if place % 2 else ("assistant", "user")  # the last one is the user's
        turns = [{"role": roles[i % 2], "content": text} for i, text in enumerate(UTTERANCES[:place])]
        session.history = turns[:-1]
        session.reply(UTTERANCES[place - 1], GREEDY)
    assert prompts == shard
    assert session.history[-3]["content"] == UTTERANCES[5]


def test_the_separator_ends_a_reply():
    session = scripted([*ids_of("Yes.\nNo."), 1], template=chat_template("\n", 5))
    # `scripted` waits for the 23rd token after BOS: that of "\n\nHuman: hi\n\nAssistant:", or of these and a line break
    assert session.reply("x" * 22, GREEDY) == "Yes."
    assert session.history[-1]["content"] == "Yes."


def test_the_oldest_turns_leave_one_by_one(prompts):
    tokenizer = byte_tokenizer(chat_template("\n", 5))
    session = ChatSession(tiny_llama(window=30), tokenizer)
    session.history = [{"role": r, "content": c * 5} for r, c in zip(("user", "assistant") * 2, "abcd", strict=True)]
    session.reply("eeeee", GenerationArgs(do_sample=False, max_new_tokens=4))
    # 1 + 6 n ids of n turns; 30 - 4 = 26 hold four of five
    assert prompts == [[0, *ids_of("bbbbb\nccccc\nddddd\neeeee\n")]]


def test_a_line_break_in_a_message_opens_no_turn(prompts):
    session = ChatSession(tiny_llama(), byte_tokenizer(chat_template("\n", 5)))
    session.reply(" one\ntwo ", GREEDY)
    assert prompts == [[0, *ids_of("one two\n")]]


def test_settings_are_optional():
    session = ChatSession(tiny_llama(), byte_tokenizer())
    torch.manual_seed(0)
    first = session.reply("hi")
    session.reset()
    torch.manual_seed(0)
    assert session.reply("hi", GenerationArgs(temperature=0.7, top_k=0)) == first


@pytest.mark.parametrize(("at_least", "said"), [(0, ""), (1, ""), (2, "a"), (4, "aaa")])
def test_a_least_number_of_tokens_counts_the_stop_token(at_least, said):
    model = scripted([1, 1, 1, 1]).model
    with torch.no_grad():
        model.lm_head.weight[ids_of("a")] = 0.5
    session = ChatSession(model, byte_tokenizer())
    settings = GenerationArgs(do_sample=False, max_new_tokens=8, min_new_tokens=at_least)
    assert session.reply("hi", settings) == said


def save(model, folder):
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_a_hostile_generation_config_has_no_effect_but_its_eos(tmp_path):
    model = tiny_llama()
    folder = save(model, tmp_path / "model")
    prompt = [0, *ids_of("\n\nHuman: hi\n\nAssistant:")]
    expected = greedy(model, prompt, 24)
    hostile = {
        "repetition_penalty": 50.0,
        "no_repeat_ngram_size": 1,
        "min_length": 500,
        "min_new_tokens": 100,
        "max_length": 3,
        "suppress_tokens": expected,
        "begin_suppress_tokens": expected[:1],
        "bad_words_ids": [[token] for token in expected],
        "forced_eos_token_id": 5,
        "do_sample": True,
        "temperature": 9.0,
        "top_k": 3,
        "num_beams": 4,
        "num_return_sequences": 2,
        "guidance_scale": 3.0,
        "max_time": 0.0,
        "stop_strings": ["a"],
        "use_cache": False,
    }
    for name in ("generation_config.json", "config.json"):
        content = json.loads((folder / name).read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps({**content, **hostile}))
        assert ChatSession.load(folder).reply("hi", GREEDY) == text_of(expected), name

    stop = expected[5]
    (folder / "generation_config.json").write_text(json.dumps({**hostile, "eos_token_id": [stop, 7]}))
    assert ChatSession.load(folder).reply("hi", GREEDY) == text_of(expected[: expected.index(stop)])


def test_load_takes_an_experiment_a_checkpoint_and_a_model_folder(tmp_path):
    experiment = tmp_path / "experiments" / "helpdesk" / "demo" / "sft"
    older = save(tiny_llama(), experiment / "checkpoints" / "step-000100")
    newer = save(tiny_llama(), experiment / "checkpoints" / "step-000500")
    (experiment / "args.json").write_text('{"stage": "sft"}')
    (experiment / "latest").write_text("step-000500\n")
    replies = {path: ChatSession.load(path).reply("hi", GREEDY) for path in (experiment, older, newer)}
    assert replies[experiment] == replies[newer] != replies[older]


def test_load_refuses_a_reward_model(tmp_path):
    config = tiny_llama().config
    config.num_labels = 1
    folder = save(LlamaForSequenceClassification(config), tmp_path / "rm")
    with pytest.raises(ValueError, match=r"is a reward model.*scores texts and cannot talk.*SFT or PPO"):
        ChatSession.load(folder)


def test_load_says_what_is_wrong(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder"):
        ChatSession.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="neither an experiment"):
        ChatSession.load(tmp_path)
    folder = save(tiny_llama(), tmp_path / "model")
    with pytest.raises(ValueError, match="device 'abacus' cannot be used"):
        ChatSession.load(folder, device="abacus")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(ValueError, match="no language model could be loaded"):
        ChatSession.load(folder)


def test_load_refuses_a_model_that_lacks_weights(tmp_path):
    folder = save(tiny_llama(), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match="lacks 9 of its weights"):
        ChatSession.load(folder)


def test_load_refuses_a_tokenizer_of_another_model(tmp_path):
    folder = save(tiny_llama(), tmp_path / "model")
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    with pytest.raises(ValueError, match="the model knows 50 tokens"):
        ChatSession.load(folder).reply("hi", GREEDY)


def test_load_converts_to_the_wanted_dtype(tmp_path):
    folder = save(tiny_llama(), tmp_path / "model")
    assert ChatSession.load(folder).model.dtype == torch.float32
    assert ChatSession.load(folder, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_real_model_streams_its_greedy_text(shared_data: Path):
    session = ChatSession.load(shared_data / "models" / "stories260K")
    assert "no chat template" in session.notes[0]
    tokenizer = session.tokenizer
    prompt = [1, *tokenizer("\n\nHuman: Tell me a story.\n\nAssistant:", add_special_tokens=False)["input_ids"]]
    ids = greedy(session.model, prompt, 40)
    expected = tokenizer.decode(ids[: ids.index(1)] if 1 in ids else ids, skip_special_tokens=True)
    pieces = list(session.stream("Tell me a story.", GenerationArgs(do_sample=False, max_new_tokens=40)))
    assert len(pieces) > 20
    assert "".join(pieces) == expected.split("\n\nHuman:")[0].strip()


def test_the_repetition_penalty_is_that_of_the_paper():
    session = ChatSession(tiny_llama(), byte_tokenizer())
    text = session.reply("Hi", GREEDY)
    expected = ids_of("\n\nHuman: Hi\n\nAssistant:")
    row, penalty = [0, *expected], 1.5
    for _ in range(GREEDY.max_new_tokens):
        logits = session.model(torch.tensor([row])).logits[0, -1].tolist()
        for token in set(row):  # Keskar et al. 2019, section 4.1, with the sign that keeps a penalty one
            logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
        row.append(max(range(len(logits)), key=logits.__getitem__))
    session.reset()
    penalized = "".join(session.stream("Hi", GREEDY, repetition_penalty=penalty))
    assert penalized == text_of(row[1 + len(expected) :]).strip()
    assert penalized != text
    assert session.last == ([0, *expected], text_of(row[1 + len(expected) :]), GREEDY.max_new_tokens)
