#!/usr/bin/env bash
# The six Office-31 tasks with DeiT-tiny, side by side on one device: docs/results/office31-deit-tiny.md.
# usage: benchmarks/office31.sh DATA WEIGHTS OUT [flags of cdtrans adapt]
#   DATA holds amazon/images, dslr/images and webcam/images; OUT gets a run folder, a log and scores for each task.
set -euo pipefail
data=$1 weights=$2 out=$3
shift 3
mkdir -p "$out"

task() {
    local source=$1 target=$2 run=$3
    local start=$SECONDS
    python3 -m cdtrans adapt "$data/$source/images" "$data/$target/images" --out "$run" \
        --backbone deit_tiny_patch16_224 --weights "$weights" --recipe authors --holdout 0 "${@:4}" > "$run.log" 2>&1
    echo $((SECONDS - start)) > "$run.seconds"
    python3 -m cdtrans eval "$run" "$data/$target/images" --json > "$run.json" 2>> "$run.log"
}

for pair in amazon:dslr amazon:webcam dslr:amazon dslr:webcam webcam:amazon webcam:dslr; do
    task "${pair%:*}" "${pair#*:}" "$out/${pair/:/-}" "$@" &
done
wait
python3 - "$out" <<'PYTHON'
import json, pathlib, sys

print("| task | source only | last epoch | best by labels (epoch) | seconds |\n|---|---|---|---|---|")
rows = []
for file in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    r = json.loads(file.read_text())
    row = [100 * r[k] for k in ("source_only_accuracy", "last_epoch_accuracy", "best_by_labels_accuracy")]
    rows.append(row)
    seconds = file.with_suffix(".seconds").read_text().strip()
    print(f"| {file.stem} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.1f} ({r['best_by_labels_epoch']}) | {seconds} |")
mean = [sum(column) / len(rows) for column in zip(*rows)]
print(f"| mean of {len(rows)} | {mean[0]:.1f} | {mean[1]:.1f} | {mean[2]:.1f} | |")
PYTHON
