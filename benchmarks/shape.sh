# What the measurements of a model's shape have in common, for scripts that set `shape` to 8b or 70b,
# `trace` and `results`: the KV room that a 24 GB card has beside the 8B weights, or what a 141 GB
# card has beside the 70B ones, with no weights on the host; how long it takes until tiers are full.
model=$(dirname "$0")/models/llama-3.1-$shape
case $shape in
8b)
    room="--gpu-kv-tokens 35200 --host-kv-size 48GiB"
    longest=8192 in_flight=400 filled=30
    at_gateds_pace="--cpu-itl-target 0.2 --gpu-itl-target 0.03"
    ;;
70b)
    room="--gpu-kv-tokens 12800 --max-model-len 4096 --host-weights none --host-kv-size 64GiB"
    longest=4096 in_flight=160 filled=50
    at_gateds_pace="--cpu-itl-target 0.17 --gpu-itl-target 0.15"
    ;;
*)
    echo "$0: the shape is 8b or 70b" >&2
    exit 2
    ;;
esac
if ! [ -r "$trace" ] || ! [ -d "$results" ] || ! [ -w "$results" ]; then
    echo "$0: cannot read the trace $trace, or not write into the folder $results" >&2
    exit 2
fi
dualpace=${DUALPACE:-dualpace}
offline="$dualpace bench offline --model $model --load-format dummy $room --skip-longer $longest --num-warmups 4 --log-level info"

# A policy's options, or those of what is named like one: dualpace-fast hurries the CPU engine and
# paces prompts, on the 70b shape to the P99 ITL of gated (which a host cannot keep on the 8b shape).
options_of() {
    case $1 in
    dualpace-fast) echo "--policy dualpace --label dualpace-fast $at_gateds_pace" ;;
    *) echo "--policy $1" ;;
    esac
}
