#!/bin/sh
# Poisson arrivals at given rates, each with a policy, one after the other on one machine.
#
#   benchmarks/rates.sh 70b AzureLLMInferenceTrace_conv.csv benchmarks/results gpu-only:0.6 dualpace:2.4
#
# Each is a window of SECONDS_EACH (100) after half a minute, from the profile that is there.
set -eu
shape=$1 trace=$2 results=$3
shift 3
. "$(dirname "$0")/shape.sh"
for run in "$@"; do
    case $run in
    ?*:[0-9]*) ;;
    *)
        echo "$0: a run is POLICY:RATE, got $run" >&2
        exit 2
        ;;
    esac
done
# shellcheck disable=SC2086,SC2046  # the options are words
for run in "$@"; do
    policy=${run%:*} rate=${run#*:}
    $offline $(options_of "$policy") --trace "$trace" --num-requests 6000 --request-rate "$rate" \
        --warmup-seconds 30 --duration "${SECONDS_EACH:-100}" --json "$results/$shape-$policy-$rate.json"
done
