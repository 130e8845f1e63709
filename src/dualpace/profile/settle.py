"""From options and a profile to what the policy gets: ITL targets, and whether the host helps.

Looks the profile up and asks the policy's own predictions; measures nothing, starts nothing.
"""

from __future__ import annotations

import logging
import math
from pathlib import Path

import msgspec

from dualpace.core.config import EngineConfig, EngineOptions
from dualpace.core.errors import ConfigError
from dualpace.policy.gated import GATED_OPERATIONS
from dualpace.policy.host import (
    HostRules,
    default_itl_target,
    runnable,
    unmeasured_costs,
    why_no_help,
)
from dualpace.profile.fingerprint import Fingerprint, require_same
from dualpace.profile.table import Profile, find, load, path_of

logger = logging.getLogger(__name__)


def settle(
    options: EngineOptions, config: EngineConfig, fingerprint: Fingerprint, weight_bytes: int
) -> EngineConfig:
    """`config` with its profile and targets resolved, and without the host if that cannot help.

    Raises `ConfigError` if a profile named by the user is of something else, or one is needed.
    """
    if config.policy == "gated":
        return _settle_gated(options, config, fingerprint)
    if config.policy != "dualpace" or not config.host_pages:
        return config
    profile, file = _profile(options.profile, fingerprint, config)
    gpu_tokens = None if profile is None else profile.gpu_kv_tokens
    if config.gpu_pages is not None:
        gpu_tokens = config.gpu_pages * config.page_tokens
    rules = _rules(config, profile, weight_bytes, options.cpu_itl_target, gpu_tokens)
    target = None if math.isinf(rules.cpu_itl_target) else rules.cpu_itl_target
    config = msgspec.structs.replace(
        config,
        profile_file=None if file is None else str(file),
        cpu_routes=rules.routes,
        cpu_itl_target=target,
        gpu_itl_target=options.gpu_itl_target,
    )
    source = "as asked" if options.cpu_itl_target else "from the profile" if profile else "a guess"
    if profile is not None:
        logger.info("profile of %s: %s", profile.date, file)
    if target is None:
        logger.info("CPU ITL target: none, as both engines run on the host")
    else:
        logger.info("CPU ITL target %.2f s (%s)", target, source)
    if config.device != "cuda":
        return config  # the stand-in has nothing to gain from going without
    host_tokens = config.host_pages * config.page_tokens
    reason = why_no_help(rules, host_tokens, gpu_tokens, config.max_num_seqs)
    if reason is None or gpu_tokens == 0:
        return config
    logger.warning("the host cannot help: %s. Serving with --policy gpu-only", reason)
    return msgspec.structs.replace(config, policy="gpu-only", host_pages=0, cpu_routes=("local",))


def lacks_profile(options: EngineOptions, config: EngineConfig, fingerprint: Fingerprint) -> bool:
    """True if a server with these options should be profiled first. On the stand-in it need not:
    its host is all there is, whatever it can do."""
    helped = config.policy != "gpu-only" and config.host_pages > 0 and config.device == "cuda"
    return (
        helped and options.profile == "auto" and (_profile("auto", fingerprint, config)[0] is None)
    )


def host_rules(config: EngineConfig, weight_bytes: int) -> HostRules | None:
    """What `settle` has settled, for an engine's policy; None where rows alone bound the host."""
    profile = None if config.profile_file is None else load(Path(config.profile_file))
    if profile is not None and config.policy == "gated":
        return HostRules(profile.cost_model(), math.inf, config.cpu_routes)
    if profile is None and config.cpu_itl_target is None and config.cpu_routes == ("local",):
        return None
    return _rules(config, profile, weight_bytes, config.cpu_itl_target or math.inf)


def _settle_gated(
    options: EngineOptions, config: EngineConfig, fingerprint: Fingerprint
) -> EngineConfig:
    needs = "--policy gated needs a profile with CPU attention in it"
    run = f"`dualpace profile run {options.model} --policy gated` measures one"
    if options.profile == "none":
        raise ConfigError(f"{needs}, and --profile is none; {run}")
    file = path_of(fingerprint) if options.profile == "auto" else Path(options.profile)
    try:
        profile = find(fingerprint) if options.profile == "auto" else load(file)
        require_same(profile.fingerprint, fingerprint)
    except ConfigError as error:
        raise ConfigError(f"{needs}: {error}; {run}") from None
    if not _judges(profile, config):
        raise ConfigError(f"{needs}: {file} has none; {run}")
    return msgspec.structs.replace(config, profile_file=str(file))


def _judges(profile: Profile, config: EngineConfig) -> bool:
    """True if the policy's questions about the host have an answer in `profile`."""
    costs = profile.cost_model()
    if config.policy == "gated":
        return costs.covers(*GATED_OPERATIONS)
    return bool(runnable(costs, config.cpu_routes))


def _rules(
    config: EngineConfig,
    profile: Profile | None,
    weight_bytes: int,
    target: float | None,
    gpu_tokens: int | None = None,
) -> HostRules:
    """`target` None: the default, which on the stand-in is no bound: its host is all there is.
    Nobody is assisted on a guess who has not asked for it."""
    routes = config.cpu_routes
    if profile is not None:
        costs = profile.cost_model()
        routes = runnable(costs, routes)
    else:
        costs = unmeasured_costs(weight_bytes, config.page_bytes // config.page_tokens)
        if "local" in routes:
            routes = ("local",)
    if not routes:
        raise ConfigError(
            f"the profile has no CPU iterations by {' or '.join(config.cpu_routes)}; "
            "`dualpace profile run` measures them"
        )
    if target is None and config.device != "cuda":
        target = math.inf
    if target is None:
        target = default_itl_target(costs, routes, config.max_num_seqs, gpu_tokens)
    return HostRules(costs, target, routes)


def _profile(
    asked: str, here: Fingerprint, config: EngineConfig
) -> tuple[Profile | None, Path | None]:
    """The profile to use and its file, or neither."""
    if asked == "none":
        return None, None
    if asked != "auto":
        profile = load(Path(asked))
        require_same(profile.fingerprint, here)
        return profile, Path(asked)
    try:
        profile = find(here)
    except ConfigError as error:
        logger.info("no profile: %s", error)
        return None, None
    if not _judges(profile, config):
        logger.info("the stored profile lacks what --policy %s asks of it", config.policy)
        return None, None
    return profile, path_of(here)
