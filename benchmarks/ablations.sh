#!/usr/bin/env bash
# The paper's Tables 5 and 6 and Fig. 2b for one task, all three at once on one device.
# usage: benchmarks/ablations.sh SOURCE TARGET KEY OUT WEIGHTS BACKBONE JOBS [flags of cdtrans adapt]
#   KEY is TARGET with its labels; OUT gets losses/, pseudo-labels/ and noise/, each with a log beside it. Each of the
#   three has up to JOBS runs side by side; stopped, the same command goes on. Flags must be such as all three have.
#   Variables: SEED (1234). The noise runs are short, NOISE_PAIRS (1920) pairs for NOISE_EPOCHS (10) epochs, which is 300
#   steps of 64; NOISE_LEVELS and NOISE_SEEDS (SEED alone) are as for 'python -m research.figures.noise', which needs the checkout as working directory.
# Several tasks at once: start it several times. On a GPU, run 'nvidia-cuda-mps-control -d' before (at most 48 runs in
# all then), and let all share one TORCHINDUCTOR_CACHE_DIR.
set -euo pipefail
source=$1 target=$2 key=$3 out=$4 weights=$5 backbone=$6 jobs=$7
shift 7
seed=${SEED:-1234}
mkdir -p "$out"

start=$SECONDS
names=() pids=()
trap 'kill "${pids[@]}" 2> /dev/null || true' INT TERM
ablate() {
    local name=$1 command=(cdtrans ablate "$1")
    shift
    [ "$name" != noise ] || command=(research.figures.noise)
    python3 -m "${command[@]}" "$source" "$target" --labels "$key" --out "$out/$name" --jobs "$jobs" \
        --backbone "$backbone" --weights "$weights" --holdout 0 "$@" >> "$out/$name.log" 2>&1 &
    names+=("$name") pids+=($!)
}
ablate losses "$@" --seed "$seed"
ablate pseudo-labels "$@" --seed "$seed"
ablate noise "$@" --pairs "${NOISE_PAIRS:-1920}" --epochs "${NOISE_EPOCHS:-10}" \
    --levels "${NOISE_LEVELS:-0,20,40,60,80,100}" --seeds "${NOISE_SEEDS:-$seed,}"

failed=0
for i in "${!pids[@]}"; do
    if ! wait "${pids[$i]}" && ! wait "${pids[$i]}"; then # a signal ends the first wait, not the process
        failed=1
        echo "${names[$i]} is not finished: $(tail -n 1 "$out/${names[$i]}.log")" >&2
    fi
done
echo $((SECONDS - start)) >> "$out/seconds"
for name in "${names[@]}"; do
    cat "$out/$name/$name.md" 2> /dev/null || true
done
exit $failed
