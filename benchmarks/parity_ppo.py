"""One iteration of TRL 1.12.0's PPOTrainer on the CPU, with its tensors.

`PPOTrainer.train` is one function. It calls `accelerator.backward` in each update, so a listener in that place can read
everything that the function holds: the rollout, advantages and returns, and the losses of this update.
"""

import inspect
import tempfile
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity_cases import EOS, OPTIMIZER, PAD, gradient_norms, load, random_ids, versions, word_tokenizer

SETTINGS = {
    "temperature": 0.7,
    "kl_coef": 0.1,
    "gamma": 0.98,
    "lam": 0.9,
    "cliprange": 0.05,
    "cliprange_value": 0.05,
    "vf_coef": 0.3,
    "num_ppo_epochs": 2,
    "missing_eos_penalty": 1.0,
}
PROMPT_LENGTHS = (3, 5, 1, 4, 2, 5)
# responses that all reach the limit without EOS, and responses of different lengths
CASES = {"full": 5, "ragged": 10}
ROLLOUT = ("logprobs", "ref_logprobs", "values", "scores", "sequence_lengths")
EXPERIENCE = ("kl", "rewards", "returns", "advantages")
METRICS = {
    "objective/kl": "kl_sequence",
    "objective/entropy": "minus_logprob_sequence",
    "policy/approxkl_avg": "approx_kl",
    "policy/clipfrac_avg": "policy_clip_fraction",
    "policy/entropy_avg": "entropy",
    "val/clipfrac_avg": "value_clip_fraction",
    "val/ratio": "ratio",
}


def record_ppo(kind: str) -> dict[str, Any]:
    """Both cases; the first seed whose responses are of the wanted form."""
    content: dict[str, Any] = {"versions": versions("trl"), "settings": SETTINGS, "optimizer": OPTIMIZER}
    for name, length in CASES.items():
        for seed in range(300):
            case = run_trainer(kind, length, seed)
            if is_wanted(name, case["responses"]):
                break
        else:
            raise RuntimeError(f"no seed gives a rollout that is {name}")
        content[name] = {"seed": seed, **case}
    content["whitening"] = whitening(content["ragged"])
    return content


def is_wanted(name: str, responses: list[list[int]]) -> bool:
    """Full: none has EOS. Ragged: ends at several places, one of them the very last, and one that was cut off.

    A sampled padding token is refused: TRL finds the end of a response by its id.
    """
    size = len(responses[0])
    lengths = [response.index(EOS) + 1 if EOS in response else size for response in responses]
    if any(PAD in response[:n] for response, n in zip(responses, lengths, strict=True)):
        return False
    ends = {n for response, n in zip(responses, lengths, strict=True) if EOS in response}
    if name == "full":
        return not ends
    return len(ends) > 2 and size in ends and any(EOS not in response for response in responses)


def run_trainer(kind: str, length: int, seed: int) -> dict[str, Any]:
    """Roll out and update twice; everything that was computed on the way."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    np.random.seed(seed)  # TRL cuts mini-batches by it, and seeds only torch
    prompts = Dataset.from_dict({"input_ids": random_ids(PROMPT_LENGTHS, 6, end=False)})
    args = PPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
        save_strategy="no", logging_steps=1, disable_tqdm=True, num_sample_generations=0, seed=seed,
        per_device_train_batch_size=len(prompts), gradient_accumulation_steps=1, num_mini_batches=1,
        total_episodes=len(prompts), local_rollout_forward_batch_size=len(prompts), response_length=length,
        stop_token="eos", learning_rate=OPTIMIZER["lr"], adam_beta1=OPTIMIZER["betas"][0],
        adam_beta2=OPTIMIZER["betas"][1], adam_epsilon=OPTIMIZER["eps"], weight_decay=OPTIMIZER["weight_decay"],
        whiten_rewards=False, kl_estimator="k1", **SETTINGS,
    )  # fmt: skip
    trainer = PPOTrainer(
        args=args,
        processing_class=word_tokenizer(),
        model=load(kind, "causal"),
        ref_model=load(kind, "reference"),
        reward_model=load(kind, "reward"),
        value_model=load(kind, "critic"),
        train_dataset=prompts,
        eval_dataset=prompts,
    )
    case: dict[str, Any] = {"updates": []}
    backward, whiten = trainer.accelerator.backward, ppo_trainer.masked_whiten

    def listen_to_whitening(values: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        case["raw_advantages"] = values.clone()
        return whiten(values, *args, **kwargs)

    def listen(loss: Tensor) -> None:
        held = inspect.currentframe().f_back.f_locals
        if not case["updates"]:
            case["queries"], case["responses"] = held["queries"].clone(), held["postprocessed_responses"].clone()
            case.update({name: held[name].clone() for name in (*ROLLOUT, *EXPERIENCE)})
        backward(loss)
        case["updates"].append(
            {
                "policy_loss": held["pg_loss"].item(),
                "value_loss": held["vf_loss"].item(),
                "loss": loss.item(),
                "actor_gradient": gradient_norms(trainer.policy_model),
                "critic_gradient": gradient_norms(trainer.value_model),
            }
        )

    trainer.accelerator.backward, ppo_trainer.masked_whiten = listen, listen_to_whitening
    try:
        trainer.train()
    finally:
        ppo_trainer.masked_whiten = whiten
    logged = next(entry for entry in trainer.state.log_history if "objective/kl" in entry)
    case["metrics"] = {ours: float(logged[theirs]) for theirs, ours in METRICS.items()}
    return {key: value.tolist() if isinstance(value, Tensor) else value for key, value in case.items()}


def whitening(case: dict[str, Any]) -> dict[str, Any]:
    """TRL's `masked_whiten` alone: with and without its mean, and by halves, as two of its ranks would do."""
    from trl.experimental.ppo.ppo_trainer import masked_whiten

    values, lengths = torch.tensor(case["raw_advantages"]), torch.tensor(case["sequence_lengths"])
    mask = torch.arange(values.shape[1]) <= lengths[:, None]
    halves = [masked_whiten(v, m) for v, m in zip(values.chunk(2), mask.chunk(2), strict=True)]
    results = {
        "shifted": masked_whiten(values, mask),
        "kept_mean": masked_whiten(values, mask, shift_mean=False),
        "by_halves": torch.cat(halves),
    }
    return {name: result.masked_fill(~mask, 0).tolist() for name, result in results.items()}
