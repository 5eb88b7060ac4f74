#!/usr/bin/env bash
# Trains and compares draft heads for the default model on one GPU; started again with the same folders, it goes on.
#
#   benchmarks/gpu/train_heads.sh PROMPTS WORK RESULTS [SECONDS]
#
# PROMPTS  JSONL file of training prompts
# WORK     folder of answers and checkpoints, some 200 MB; not needed afterwards
# RESULTS  folder of heads, curves and evaluations
# SECONDS  of this call [540]; exit status 3 if they were not enough
#
# RECIPES in the environment names those to train, in their order; MAX_PROMPT_TOKENS [1024] and ANSWERS_PER_PROMPT [1] the data; SPECWIRE the command.
set -euo pipefail

prompts=$1 work=$2 results=$3 end=$((SECONDS + ${4:-540}))
specwire=${SPECWIRE:-specwire}
mkdir -p "$work" "$results"

# name -> recipe and changes. The first two are what is served, the others what they are compared with.
declare -A recipes=(
  [eagle3]="eagle3 train_seconds=150 num_steps=6000"
  [dspark]="dspark train_seconds=150 num_steps=6000"
  [eagle3-unroll3]="eagle3 train_seconds=60 num_steps=2400 num_draft_tokens=3"
  [eagle3-short]="eagle3 train_seconds=60 num_steps=2400"
  [eagle3-kl]="eagle3 train_seconds=60 num_steps=2400 tv_weight=0"
  [eagle3-half]="eagle3 train_seconds=60 num_steps=2400 train_share=0.5"
  [eagle3-layers2]="eagle3 train_seconds=60 num_steps=2400 num_layers=2"
  [dspark-short]="dspark train_seconds=60 num_steps=2400"
  [dspark-layers1]="dspark train_seconds=60 num_steps=2400 num_layers=1"
  [dspark-layers3]="dspark train_seconds=60 num_steps=2400 num_layers=3"
  [dspark-rank128]="dspark train_seconds=60 num_steps=2400 markov_rank=128"
)
order=${RECIPES:-eagle3 dspark eagle3-short eagle3-kl eagle3-unroll3 dspark-short dspark-layers1}

for name in $order; do
  [[ -v "recipes[$name]" ]] || { echo "no recipe $name; there are ${!recipes[*]}" >&2; exit 2; }
  [[ -f $results/$name/head/config.json ]] && continue
  left=$((end - SECONDS))
  ((left > 20)) || { echo "$name and what follows are left for another call"; exit 3; }
  echo "== $name, $left s left"
  read -r recipe changes <<<"${recipes[$name]}"
  settings=()
  for change in $changes; do settings+=(--set "$change"); done
  "$specwire" train --device cuda --prompts "$prompts" --recipe "$recipe" "${settings[@]}" --max-prompt-tokens "${MAX_PROMPT_TOKENS:-1024}" \
    --answers-per-prompt "${ANSWERS_PER_PROMPT:-1}" --answers "$work/answers" --output "$work/$name" --max-seconds "$left"
  mkdir -p "$results/$name"
  cp -r "$work/$name/head" "$work/$name/curve.json" "$work/$name/run.json" "$results/$name/"
done
