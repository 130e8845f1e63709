#!/bin/sh
# A closed loop under every policy, one after the other on one machine, from a profile measured first.
#
#   benchmarks/closed_loop.sh 70b AzureLLMInferenceTrace_conv.csv benchmarks/results [SECONDS]
#
# 8b: 400 requests of up to 8,192 tokens in flight; 70b: 160 of up to 4,096. SECONDS is the window
# (120), before which the tiers fill. POLICIES (gpu-only gated dualpace) names those that run, PROFILE=no
# takes the profile that is there.
set -eu
shape=$1 trace=$2 results=$3 seconds=${4:-120}
. "$(dirname "$0")/shape.sh"
# shellcheck disable=SC2086,SC2046  # the options are words
{
    if [ "${PROFILE:-yes}" = yes ]; then
        $dualpace profile run "$model" --load-format dummy $room --seconds 40
        $dualpace profile check "$model" --load-format dummy $room --seconds 30 || true
    fi
    for policy in ${POLICIES:-gpu-only gated dualpace}; do
        warmup=$filled
        [ "$policy" = gpu-only ] && warmup=15
        $offline $(options_of "$policy") --trace "$trace" --num-requests 6000 \
            --max-concurrency $in_flight --warmup-seconds $warmup --duration "$seconds" \
            --json "$results/$shape-$policy-window.json"
    done
}
