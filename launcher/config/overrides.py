"""The words of the command line, before Hydra reads them, and the choices of the groups."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate, takewhile
from pathlib import Path
from typing import NamedTuple

from launcher.config.nemo_launcher import way
from launcher.errors import UserError, did_you_mean, escape, literal, nearest, shortened

# Each stage has a configuration group of the same name.
WORKSPACE = "workspace"
STAGES = ("data_preparation", "training", "conversion", "evaluation", WORKSPACE, "command")
GROUPS = ("cluster", *STAGES)
# Further groups that a stage needs: a workspace has the environment of a training.
_REQUIRED_GROUPS = {WORKSPACE: ("training",)}
# The file that a launch is composed from.
MAIN = "config"

# Keys with values that are always text: variables, and images such as nvcr.io#nvidia/nemo:25.07.
_TEXTS = re.compile(
    r"(((cluster|command)\.)?env_(vars|expand)(\..*)?|stage_cluster\.\w+\.env_(vars|expand)\..+|env_files(\..*)?"
    r"|((cluster|workspace|command)\.)?container"
    r"|launcher_scripts_path|data_dir|base_results_dir|images_dir"
    r"|conversion\.(source|output)|evaluation\.(source|converted|results)"
    r"|image\.(base|digest|registry|owner|tag|workdir|dev_script|pip_index|(versions|env|labels)\..+))$",
    re.DOTALL,
)

# Lists of text: their items hold characters that Hydra's grammar refuses, as in [--container-unshare=net].
_LISTS = re.compile(
    r"((stage_cluster\.\w+|cluster)\.(srun_args|task_prefix|setup)|container_mounts|container_options\.env|data_preparation\.inputs"
    r"|evaluation\.(lm_eval\.tasks|perplexity\.data_prefix)"
    r"|command\.(argv|writable)"
    r"|image\.(registries|packages|dev_packages|python_packages))$"
)
# Lists that may be given as one text, which is split as a shell would.
_ARGUMENTS = re.compile(r".*\.(srun_args|task_prefix)$")
_PLAIN_LIST = re.compile(r"""\[(?P<items>[^'"\[\]{}\\$]*)\]""")

# Mappings with the user's keys, and a key that the tree does not show: a new one needs no `+`.
_OPEN = re.compile(
    r"(((cluster|command)\.)?env_(vars|expand)|env_files|cluster\.(sbatch|spank)|stage_cluster|image\.(env|labels)"
    r"|training\.resume\.accept_data)(\..*)?$",
    re.DOTALL,
)
_OPEN_TEXTS = (
    *("env_vars", "cluster.env_vars", "command.env_vars", "env_expand", "cluster.env_expand"),
    *("env_files", "image.env", "image.labels"),
)

_FORM = "an override is KEY=VALUE, GROUP=CHOICE, +KEY=VALUE or ~KEY, such as training=gpt3/126m"
# Hydra's parser would end with errors of Python's own; the name of a file has at most 255 bytes.
_TOO_MANY_DIGITS, _MOST_NESTED, _LONGEST_NAME = re.compile(r"[0-9]{1001}"), 100, 250
_WORD = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[^=@]*)(?P<package>@[^=]*)?(?P<value>=.*)?", re.DOTALL)

# A choice of the group `image`, and the flavor of that.
_RECIPE = re.compile(r"(?P<name>[A-Za-z0-9][\w-]*)(?::(?P<flavor>[A-Za-z0-9][\w-]*))?", re.ASCII)

# Values that Hydra reads by itself: quotes, lists, mappings, interpolations, escapes; nothing and null.
_HYDRA_READS = re.compile(r"""['"\[{].*|.*(\$\{|\\).*|null|""", re.DOTALL | re.IGNORECASE)


class Override(NamedTuple):
    """One override in its parts; `value` is ``None`` where there is no ``=``."""

    text: str
    sign: str
    key: str
    value: str | None

    @property
    def is_choice(self) -> bool:
        """True if its form is that of a choice of a group's file."""
        return self.key in GROUPS and self.value is not None and not self.value.startswith("{")


def recipe_and_flavor(text: str) -> tuple[str, str | None] | None:
    """Parse `NAME[:FLAVOR]`, which names a recipe; return ``None`` for a text with a `/`, `#` or `.`."""
    match = _RECIPE.fullmatch(text)
    return (match["name"], match["flavor"]) if match else None


def parse_override(text: str) -> Override:
    match = _WORD.fullmatch(text)
    assert match is not None  # every text has this form
    value = match["value"]
    return Override(text, match["sign"] or "", match["key"], value[1:].strip(" \t") if value else None)


def hydra_value(value: str) -> str:
    """Quote any text for Hydra's override grammar, so that it arrives as it is.

    Neither Hydra's grammar nor OmegaConf's, which reads ``${...}`` and ``???``, finds anything in it.
    """
    if value == "???":  # OmegaConf's word for a value that is missing
        return r"""'${oc.decode:"\'???\'"}'"""
    # A backslash is literal, except before the end of the text or the start of an interpolation.
    text = escape_interpolation(value)
    text = re.sub(r"(\\*)'", r"\1\1\\'", text)
    text = re.sub(r"(\\+)$", r"\1\1", text) if text.endswith("\\") else text
    return f"'{text}'"


def quote_for_shell(text: str) -> str:
    """Quote for the shell; what Hydra sees as quoted already is easier to read in double quotes."""
    return shlex.quote(text) if re.search(r'["$`!\\]', text) or "'" not in text else f'"{text}"'


def typed_override(key: str, text: str) -> str:
    """Return the shell word that sets a key to any text."""
    is_plain = re.fullmatch(r"[\w./:@%+|-]+", text, re.ASCII) and text.lower() != "null"
    return quote_for_shell(f"{key}={text if is_plain else hydra_value(text)}")


def escape_interpolation(text: str) -> str:
    """Escape ``${``, so that OmegaConf leaves it as it is."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def convert_for_hydra(texts: Sequence[str], primary: str = MAIN) -> list[str]:
    """Return the overrides in Hydra's syntax; raise UserError for a malformed one."""
    parsed = [parse_override(text) for text in texts]
    typed = keys_for_hydra(parsed)
    if primary != MAIN:
        return typed
    skipped = skipped_groups(parsed)
    counting = {override.key: override for override in parsed if override.is_choice}  # the last one does
    for override in counting.values():
        _check_choice(override, skipped)
    return [*typed, *(f"~{group}" for group in skipped)]


def keys_for_hydra(parsed: Sequence[Override]) -> list[str]:
    """Return the overrides of keys in Hydra's syntax; raise UserError for a malformed one."""
    for override in parsed:
        _check_form(override)
    return [_format_typed(override) for override in parsed]


def skipped_groups(overrides: Sequence[Override]) -> list[str]:
    """Return the groups of the stages that are not requested, which are not composed."""
    stages = find_requested_stages(overrides)
    needed = {*stages, *(group for stage in stages for group in _REQUIRED_GROUPS.get(stage, ()))}
    return [stage for stage in STAGES if stage not in needed]


def find_requested_stages(overrides: Sequence[Override]) -> list[str]:
    """Read the stages from the overrides: which groups to compose depends on them."""
    requested = ["training"]
    text = "stages=[training]"
    for override in overrides:
        if override.key == "stages" and override.value is not None:
            requested, text = re.findall(r"[\w-]+", override.value), override.text
    if not requested:
        raise UserError(
            f"{escape(text)}: no stage is asked for", key="stages", hint=f"valid: {', '.join(STAGES)}"
        )
    for stage in requested:
        if stage not in STAGES:
            hint = way(stage) or did_you_mean(stage, STAGES)
            raise UserError(f"stages={stage}: there is no such stage", key="stages", hint=hint)
    return requested


def is_text(override: Override) -> bool:
    """Return True if a comma in the value is a part of it, because the key takes text or a list of text."""
    key, value = override.key, override.value or ""
    is_arguments = bool(_ARGUMENTS.match(key)) and not value.startswith("[")
    return is_arguments or bool(_TEXTS.match(key) or _OPEN.match(key))


# The GPUs of a node, and the keys that follow them, each with those that would set it as well.
NODE_GPUS = "cluster.gpus_per_node"
DEVICES, GRES = "training.trainer.devices", "cluster.gres"
_FOLLOWING = {DEVICES: (DEVICES, "training.trainer"), GRES: (GRES,)}


def is_derived_from_gpus(key: str, overrides: Sequence[Override]) -> bool:
    """Return True if a value follows the GPUs of a node: the user typed these and not the value."""
    typed = {override.key for override in overrides if override.sign != "~"}
    return key in _FOLLOWING and NODE_GPUS in typed and typed.isdisjoint(_FOLLOWING[key])


def _format_typed(override: Override) -> str:
    """Return the override as Hydra is to read it.

    Text is quoted: Hydra would read 1.10 as 1.1 and 0022 as 22, and no ``#`` at all. ``+`` becomes ``++``, so
    that a key may be there already, perhaps as a null.
    """
    key, value, sign = override.key, override.value, override.sign
    if sign == "~" or value is None:
        return override.text
    if override.is_choice:
        return f"{key}={value}" if sign else override.text
    if _LISTS.match(key):
        value = _quote_items(key, value)
    elif value.startswith("~/") or (
        _TEXTS.match(key) and key not in _OPEN_TEXTS and not _HYDRA_READS.fullmatch(value)
    ):
        value = hydra_value(value)
    elif not sign and not _OPEN.match(key):
        return override.text
    return f"{'++' if sign or _OPEN.match(key) else ''}{key}={value}"


def _quote_items(key: str, value: str) -> str:
    """Quote the items of a list of text, and arguments that were given as one text."""
    match = _PLAIN_LIST.fullmatch(value)
    if match:
        items = [item.strip() for item in match["items"].split(",")] if match["items"].strip() else []
        if all(items):
            return f"[{', '.join(item if item == 'null' else hydra_value(item) for item in items)}]"
    elif _ARGUMENTS.match(key) and not _HYDRA_READS.fullmatch(value):
        return hydra_value(value)
    return value


def _check_form(override: Override) -> None:
    text = override.text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{escape(text)}: this override is not valid UTF-8", key=override.key) from error
    if not text.strip():
        raise UserError(f"{literal(text)}: an empty override", hint=_FORM)
    if not override.key.strip():
        raise UserError(f"{escape(text)}: a key is missing", hint=_FORM)
    depth = max(accumulate((char in "[{(") - (char in "]})") for char in text))
    if depth > _MOST_NESTED or _TOO_MANY_DIGITS.search(text):
        message = (
            f"{escape(shortened(override.key))}: a number of over 1,000 digits, or brackets nested too deeply"
        )
        raise UserError(message, key=override.key)
    if override.value is None and override.sign != "~":
        hint = f"{override.key}=CHOICE" if override.key in GROUPS else _FORM
        if "/" in override.key:
            hint = f"a model size is chosen with training={escape(override.key)}"
        raise UserError(f"{escape(text)}: a value is missing", key=override.key, hint=hint)


def _check_choice(override: Override, skipped: Sequence[str]) -> None:
    """Refuse a text that Hydra would mistake for a choice."""
    value = override.value or ""
    needed = override.key not in skipped
    if override.sign == "~" or (value.lower() == "null" and not needed):
        return
    parts = value.split("/")
    if value.lower() in ("", "null") or any(
        part in ("", "..") or part[0] in "._" or len(part.encode()) > _LONGEST_NAME for part in parts
    ):
        raise NoSuchChoice(override.key, value)


class NoSuchChoice(UserError):
    """A choice that its group does not have; the list of those it has is added on the way out."""

    def __init__(self, group: str, choice: str, hint: str | None = None) -> None:
        super().__init__(f"{group}={escape(choice)}: there is no such choice", key=group, hint=hint)
        self.group, self.choice = group, choice


# --- the choices of the groups

# A number of parameters in a name: 126m, 1.3b, 1b3.
_SIZE = re.compile(r"(?<![a-z0-9.])(\d{1,9}(?:\.\d{1,9})?)([mbt])(\d{0,9})(?![a-z0-9])")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_FAR = 4.0  # a size that differs by this factor is another one
_ABOUT = 1.5  # without a family, all that are nearer


def options_of(group: str, roots: Sequence[Path]) -> list[str]:
    """Return the choices of a group, such as ``gpt3/126m``, without files that start with `_`."""
    folders = [root / group for root in roots if (root / group).is_dir()]
    files = [(path.relative_to(folder), path) for folder in folders for path in folder.rglob("*.yaml")]
    return sorted({str(name.with_suffix("")) for name, path in files if path.name[0] != "_"})


def about(group: str, choice: str, roots: Sequence[Path]) -> str | None:
    """Return the first comment in the file of a choice, up to a full stop."""
    path = next((file for root in roots if (file := root / group / f"{choice}.yaml").is_file()), None)
    lines = path.read_text(encoding="utf-8").splitlines() if path else []
    comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))
    sentence, stop, _ = comment.partition(". ")
    return (sentence if stop else comment.removesuffix(".")) or None


def choice_hint(choice: str, options: Sequence[str]) -> str:
    """Suggest the nearest choice, and list those of the same family, or all."""
    near = _select_family(choice, options)
    listing = f"valid: {', '.join(near) or 'none'}"
    # A family, or a part of files (`_base`), is no nearer to one than to another.
    is_part = "/_" in f"/{choice}"
    is_family = any(name.startswith(f"{choice}/") for name in near)
    suggestions = [] if is_part or is_family else _nearest(choice, near)
    return f"did you mean {' or '.join(map(repr, suggestions))}? {listing}" if suggestions else listing


def _select_family(choice: str, options: Sequence[str]) -> list[str]:
    family = choice.split("/")[0]
    return [name for name in options if name.startswith(f"{family}/")] or list(options)


def find_nearest_choice(choice: str, options: Sequence[str]) -> str | None:
    """Return the choice that is most likely meant, of the same family where there is one."""
    near = _select_family(choice, options)
    candidates = [*_nearest(choice, near), *(near if len(near) < len(options) else [])]
    return candidates[0] if candidates else None


def parameters_in(name: str) -> float | None:
    """Return the number of parameters that the name of a model size states, such as 1.3e9 of ``gpt3/1b3``."""
    match = _SIZE.search(name.lower())
    if match is None:
        return None
    number, unit, rest = match.groups()
    return float(f"{number}.{rest}" if rest and "." not in number else number) * _UNITS[unit]


def _nearest(choice: str, options: Sequence[str]) -> list[str]:
    """Return the choices nearest in size, if the name states one and any is similar, else in spelling."""
    named = [option for option in options if option.endswith(f"/{choice}")]
    target = parameters_in(choice)
    if named or not target:
        return named or nearest(choice, options)

    def distance(option: str) -> float:
        return abs(math.log((parameters_in(option) or math.inf) / target))

    def order(option: str) -> tuple[float, float]:
        return round(distance(option), 6), -SequenceMatcher(None, choice.lower(), option).ratio()

    ordered = sorted((name for name in options if distance(name) < math.log(_FAR)), key=order)
    if "/" in choice or not ordered or distance(ordered[0]) == 0:
        return ordered[:1]
    # Without a family: the nearest of each.
    best: dict[str, str] = {}
    for name in ordered:
        if distance(name) < math.log(_ABOUT):
            best.setdefault(name.partition("/")[0], name)
    return list(best.values())
