"""The scripts of data_prep/zh_sentiment on miniature data, and its configurations."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from rlhf_stages.args import (
    ClassifierArgs,
    EvaluateArgs,
    FabricArgs,
    GenerationArgs,
    ModelArgs,
    PPOArgs,
    RMArgs,
    RolloutArgs,
    SFTArgs,
    ZhSentimentArgs,
)
from rlhf_stages.cli import parse, run
from rlhf_stages.data.shards import open_shard
from rlhf_stages.data.tokenizer import encode_text, load_tokenizer
from rlhf_stages.data.zh_sentiment import PROMPTS
from rlhf_stages.rewards.spec import read_specs

from helpers import ROOT, load_script, run_stage

PLACES = ("酒店", "饭馆", "宾馆", "食堂", "客栈", "小店")
PRAISE = ("干净整洁，很满意", "热情周到，推荐", "好吃又便宜，不错", "安静舒服，喜欢")
BLAME = ("又脏又乱，失望", "态度恶劣，别来", "难吃还贵，太差", "吵得睡不着，后悔")
SETTINGS = ROOT / "configs" / "zh_sentiment"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Reviews of six places, lists of two to four reviews, and one review that stands in both."""
    folder = tmp_path_factory.mktemp("zh")
    rows = [
        f"{label},{place}第{n}天{text}\n"
        for place in PLACES
        for n in range(1, 6)
        for label, texts in ((1, PRAISE), (0, BLAME))
        for text in texts
    ]
    (folder / "reviews.csv").write_text("label,review\n" + "".join(rows) + "1,我的手机真好用\n", encoding="utf-8")
    lists = []
    for n in range(40):
        good, bad = PRAISE[n % 4], BLAME[n % 3]
        lists.append([f"手机{n}{good}", f"手机{n}还行", f"手机{n}{bad}", f"电脑{n}{bad}"][: 2 + n % 3])
    lists.append(["我的手机，真好用！", "手机坏了"])
    (folder / "lists.tsv").write_text("".join("\t".join(row) + "\n" for row in lists), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def models(corpus):
    """A folder with a causal model and an encoder, smaller than the script makes them by default."""
    small = ["--hidden_size=16", "--num_layers=1", "--num_heads=2", "--context=64", "--min_count=1"]
    for kind in ("llama", "bert"):
        argv = [f"--destination_dir={corpus / kind}", f"--source={corpus / 'reviews.csv'}", f"--kind={kind}", *small]
        call("make_model", *argv, f"--rank_lists={corpus / 'lists.tsv'}")
    return corpus


def call(script, *argv):
    """Run a script of the folder with flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{script}.py", *argv])
        run(load_script(f"data_prep/zh_sentiment/{script}.py").main)


@pytest.fixture(scope="module")
def prepared(models):
    """All stages of the corpus."""
    common = [f"--destination_dir={models / 'data'}", f"--tokenizer_name={models / 'llama'}", "--num_workers=1"]
    common += [f"--source={models / 'reviews.csv'}", f"--rank_lists={models / 'lists.tsv'}"]
    common += ["--max_length=40", "--max_prompt_length=16", "--test_percentage=0.2"]
    for stage in ("finetune", "preference", "prompt", "classify"):
        flags = ["--num_prompts=60"] if stage == "prompt" else []
        call("prepare_data", *common, f"--stage={stage}", *flags)
    return models / "data"


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_the_tokenizer_has_a_token_for_each_character(models, kind):
    tokenizer = load_tokenizer(str(models / kind))
    text = "酒店 第3天，</s>干净"
    ids = encode_text(tokenizer, text)
    known = [character if character in tokenizer.get_vocab() else None for character in text]
    assert [tokenizer.convert_ids_to_tokens(i) if i != tokenizer.unk_token_id else None for i in ids] == known
    assert known.count(None) == 5  # the space, </s> has two that no review has
    assert tokenizer.decode(encode_text(tokenizer, "酒店第3天，干净")) == "酒店第3天，干净"
    special = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (0, 1, 2, 3)
    assert tokenizer("干净")["input_ids"] == [1, *encode_text(tokenizer, "干净"), 2]
    assert AutoTokenizer.from_pretrained(models / kind).model_max_length == 64


def test_all_kinds_share_the_tokenizer_and_load(models):
    vocabularies = {kind: load_tokenizer(str(models / kind)).get_vocab() for kind in ("llama", "bert")}
    assert vocabularies["llama"] == vocabularies["bert"]
    model = AutoModelForCausalLM.from_pretrained(models / "llama")
    assert model.config.vocab_size == len(vocabularies["llama"])
    assert model.generation_config.eos_token_id == 2
    encoder = AutoModelForSequenceClassification.from_pretrained(models / "bert")
    assert encoder.config.max_position_embeddings == 64


@pytest.mark.parametrize(("kind", "places"), [("gpt2", 64), ("roberta", 68)])
def test_the_other_kinds(models, tmp_path, kind, places):
    shape = ["--hidden_size=16", "--num_layers=1", "--num_heads=2", "--context=64"]
    call("make_model", f"--destination_dir={tmp_path}", f"--source={models / 'reviews.csv'}", f"--kind={kind}", *shape)
    config = json.loads((tmp_path / "config.json").read_text())
    # RoBERTa's first place is the one after its padding id, 3
    assert config["model_type"] == kind
    assert (config.get("max_position_embeddings") or config["n_positions"]) == places


def texts(folder, stage, split):
    tokenizer = load_tokenizer(json.loads((folder / "args.json").read_text())["tokenizer"]["name"])
    return [
        [tokenizer.decode(ids, skip_special_tokens=True) for ids in (record.prompt, *record.responses)]
        for record in open_shard(folder / f"{stage}_{split}.pt")
    ]


def test_stages_and_splits(prepared):
    splits = ("train", "validation", "test")
    reviews = {split: {"".join(row) for row in texts(prepared, "finetune", split)} for split in splits}
    assert sum(map(len, reviews.values())) == len(PLACES) * 5 * 8  # all but the one that a list holds
    assert not reviews["train"] & reviews["test"]
    manifest = json.loads((prepared / "args.json").read_text())
    assert manifest["dataset"] == "zh_sentiment"
    assert set(manifest["stages"]) == {"finetune", "preference", "prompt"}
    counts = manifest["stages"]["finetune"]["counts"]
    assert sum(counts[split]["skipped"].get("also in a ranked list", 0) for split in splits) == 1
    for split in splits:
        for half in "ab":
            lines = (prepared / f"sentiment_{half}_{split}.jsonl").read_text("utf-8").splitlines()
            assert {json.loads(line)["text"] for line in lines} <= reviews[split]
    lists = [row for split in splits for row in texts(prepared, "preference", split)]
    assert {len(row) - 1 for row in lists} == {2, 3, 4}
    assert all(row[0] == "评论：" for row in lists)
    assert any(row[1].startswith("手机3") and row[2] == "手机3还行" for row in lists)
    prompts = texts(prepared, "prompt", "train")
    assert len(prompts) == 60
    assert len({row[0] for row in prompts}) == 4


def test_what_is_in_both_is_told(prepared, capfd):
    call(
        "prepare_data", f"--destination_dir={prepared.parent / 'again'}", "--tokenizer_name=unused",
        f"--source={prepared.parent / 'reviews.csv'}", f"--rank_lists={prepared.parent / 'lists.tsv'}",
        "--stage=classify", "--test_percentage=0.2",
    )  # fmt: skip
    captured = capfd.readouterr()
    assert "0 word for word, 1 if only letters and digits count; dropped" in captured.err
    assert "1 also in a ranked list" in captured.out


def test_the_stages_run_on_the_data(prepared, tmp_path):
    folder, short = prepared.parent, ["--max_steps=2", "--learning_rate=1e-3", "--lr_warmup_steps=1"]
    sft = run_stage("sft", tmp_path, prepared, f"--model_name={folder / 'llama'}", "--max_new_tokens=4", *short)
    flags = ["--loss_type=last_token", *short]
    rm = run_stage("rm", tmp_path, prepared, f"--sft_experiment_dir={sft}", *flags)
    assert 0 <= json.loads((rm / "summary.json").read_text())["val/order_acc"] <= 1
    reward, judge = (
        run_stage(
            "classifier", tmp_path, prepared, f"--label_kind=sentiment_{half}", f"--model_name={folder / kind}",
            f"--experiment_name={half}", *short,
        )
        for half, kind in (("a", "bert"), ("b", "llama"))
    )  # fmt: skip
    ppo = run_stage(
        "ppo", tmp_path, prepared, f"--sft_experiment_dir={sft}", "--max_steps=1", "--rollout_size=8",
        "--rollout_mini_batch_size=8", "--max_new_tokens=4", "--eval_iters=1", "--normalize_rewards=False", "--reward",
        f"positive=1,type=classifier,model={reward},label=positive,text=whole",
    )  # fmt: skip
    argv = ["--experiment_dirs", str(sft), str(ppo), f"--data_dir={prepared}", f"--classifier={judge}"]
    argv += ["--num_prompts=6", "--max_new_tokens=4", "--accelerator=cpu", "--devices=1"]
    result = load_script("scripts/evaluate.py").main(argv)
    assert result["args"]["classifier"] == str(judge)
    for summary in result["summary"].values():
        assert 0 < summary["classifier probability"]["value"] < 1
        assert "repeated token (%)" in summary


# ---- configurations

GROUPS = {
    "prepare": (ZhSentimentArgs,),
    "sft": (SFTArgs, ModelArgs, GenerationArgs, FabricArgs),
    "rm": (RMArgs, ModelArgs, FabricArgs),
    "classifier": (ClassifierArgs, ModelArgs, FabricArgs),
    "ppo": (PPOArgs, ModelArgs, RolloutArgs, FabricArgs),
    "evaluate": (EvaluateArgs, GenerationArgs, FabricArgs),
}
NEEDED = {
    "prepare": ["--destination_dir=d", "--tokenizer_name=t", "--source=s", "--rank_lists=r"],
    "ppo": ["--sft_experiment_dir=s", "--rm_experiment_dir=r"],
    "evaluate": ["--experiment_dirs", "e"],
}


@pytest.mark.parametrize("path", sorted(SETTINGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_key_of_the_offline_variant_parses(path):
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    groups = parse(*GROUPS[path.stem], argv=[f"--config={path}", *NEEDED.get(path.stem, [])])
    for name, value in content.items():
        assert any(getattr(group, name, None) == value for group in groups), name
    assert set(GROUPS) == {path.stem for path in SETTINGS.glob("*.yaml")}


def test_the_configuration_of_transformers_tasks():
    path = ROOT / "configs" / "zh_sentiment_ppo.yaml"
    args, _, generation, _ = parse(PPOArgs, ModelArgs, RolloutArgs, FabricArgs, argv=[f"--config={path}"])
    assert (args.rollout_size, args.ppo_epochs, args.max_steps) == (128, 4, 157)
    assert (args.init_kl_coeff, args.target_kl_coeff, args.kl_horizon) == (0.2, 6, 10_000)
    assert (args.kl_control, args.kl_target_per) == ("horizon", "response")
    assert (args.gae_gamma, args.gae_lambd, args.vf_coeff) == (1.0, 0.95, 0.1)
    assert (args.clip_coeff, args.value_clip_coeff or args.clip_coeff) == (0.2, 0.2)
    assert (args.actor_learning_rate, args.optimizer) == (1.41e-5, "Adam")
    assert (generation.max_new_tokens, generation.top_k, generation.top_p) == (16, 0, 1.0)
    assert args.share_actor_critic
    (reward,) = read_specs(None, args.reward)
    assert (reward.kind, reward.options["text"], reward.weight(1)) == ("classifier", "whole", 1.0)
    assert reward.options["model"] == "uer/roberta-base-finetuned-jd-binary-chinese"
    assert reward.options["label"] == "positive (stars 4 and 5)"
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert all(getattr(args, name, getattr(generation, name, None)) == value for name, value in content.items())


def save_as_the_hub_has_it(folder, model, alphabet):
    """A model with a tokenizer of BERT's: [CLS] and [SEP] stand in place of BOS and EOS, as in the example."""
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *alphabet]), "utf-8")
    BertTokenizer(str(folder / "vocab.txt"), model_max_length=64).save_pretrained(folder)
    model.save_pretrained(folder)


def test_the_configuration_of_transformers_tasks_runs_as_its_comment_says(corpus, tmp_path, monkeypatch):
    """With folders of the names of the hub's models, two steps in place of 157, and smaller rollouts."""
    alphabet = sorted({*(corpus / "reviews.csv").read_text("utf-8"), *"".join(PROMPTS)} - {"\n"})
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    labels = {0: "positive (stars 4 and 5)", 1: "negative (stars 1, 2 and 3)"}
    size = len(alphabet) + 5
    # GPT-2's own ids of BOS and EOS, 50256, stay in the configuration, and are none of this vocabulary
    policy = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=16, n_layer=1, n_head=2, n_positions=64))
    scorer = BertForSequenceClassification(
        BertConfig(vocab_size=size, max_position_embeddings=64, id2label=labels, **shape)
    )
    monkeypatch.chdir(tmp_path)
    save_as_the_hub_has_it(tmp_path / "uer" / "gpt2-chinese-cluecorpussmall", policy, alphabet)
    save_as_the_hub_has_it(tmp_path / "uer" / "roberta-base-finetuned-jd-binary-chinese", scorer, alphabet)

    data, name = "data/zh_sentiment/uer", "uer/gpt2-chinese-cluecorpussmall"
    for stage in ("finetune", "prompt"):
        call(
            "prepare_data", f"--stage={stage}", f"--source={corpus / 'reviews.csv'}", f"--tokenizer_name={name}",
            f"--rank_lists={corpus / 'lists.tsv'}", f"--destination_dir={data}", "--num_workers=1",
            *(["--num_prompts=40"] if stage == "prompt" else []),
        )  # fmt: skip
    local = ["--accelerator=cpu", "--devices=1"]
    argv = [f"--data_dir={data}", f"--model_name={name}", "--max_steps=1", "--learning_rate=0"]
    sft = load_script("scripts/rlhf_sft.py").main([*argv, "--max_new_tokens=4", *local])
    assert sft == Path("experiments/zh_sentiment/uer/sft")
    smaller = ["--max_steps=2", "--rollout_size=8", "--rollout_mini_batch_size=8", "--mini_batch_size=8"]
    argv = [f"--config={ROOT / 'configs' / 'zh_sentiment_ppo.yaml'}", *smaller, "--micro_batch_size=8", *local]
    ppo = load_script("scripts/rlhf_ppo.py").main(argv)
    assert json.loads((ppo / "summary.json").read_text())["steps"] == 2
    samples = [json.loads(line) for line in (ppo / "samples.jsonl").read_text("utf-8").splitlines()]
    assert {"".join(sample["prompt"].split()) for sample in samples} <= {"".join(p.split()) for p in PROMPTS}
