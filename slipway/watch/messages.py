"""The messages of alerts, as people read them, and as the services take them that people read."""

import math
import shlex
import time
from typing import Any, Dict, NamedTuple, Optional, Sequence

from slipway.watch.alerts import OPENED, REPEATED, RESOLVED, Message

_BARS = "▁▂▃▄▅▆▇█"
_NO_NUMBER = "·"
_PLOTTED = 30
_REACTIONS = {
    "hold": "holds the jobs that come next",
    "save": "has its tasks save, and ends",
    "stop": "ends without saving",
}
_HEADS = {OPENED: "", REPEATED: "still: ", RESOLVED: "over: "}


class Run(NamedTuple):
    """The run that a message is about: its name, its directory, and the host that speaks."""

    name: str
    directory: str
    host: str


def compose_subject(run: Run, message: Message) -> str:
    """Return the one line that tells the most."""
    return f"[slipway] {run.name}: {_HEADS[message.event]}{message.why}"


def compose_text(run: Run, message: Message) -> str:
    """Return the lines that people read: what, where, since when, the last values, and what to type."""
    origin = message.origin
    where = [f"{name} {value}" for name, value in origin._asdict().items() if value is not None]
    lines = [f"{run.name}: {_HEADS[message.event]}{message.why}", ""]
    lines.append(f"run:     {run.directory}" + (f" ({', '.join(where)})" if where else ""))
    lines.append(f"watch:   {message.detector}, {message.name}, from {run.host}")
    if message.step is not None:
        lines.append(f"step:    {message.step:,}")
    if message.since is not None:
        lines.append(f"since:   {_format_moment(message.since)}")
    lines.append(f"told:    {_format_moment(message.time)}")
    if message.values:
        newest = message.values[-1]
        lines.append(f"values:  {draw(message.values)}  {newest:.6g}")
    if message.reaction in _REACTIONS:
        lines.append(f"react:   the job {_REACTIONS[message.reaction]}")
    lines += ["", f"look:    {suggest_command(run, message)}"]
    return "\n".join(lines) + "\n"


def to_payload(run: Run, message: Message) -> Dict[str, Any]:
    """Return the message for programs, as the command hook reads it and the generic webhook gets it."""
    values = [value if math.isfinite(value) else None for value in message.values]
    return dict(
        message.to_json(),
        values=values,
        name=message.name,
        run=run.name,
        run_dir=run.directory,
        host=run.host,
        subject=compose_subject(run, message),
        text=compose_text(run, message),
        command=suggest_command(run, message),
    )


def to_webhook_body(style: str, run: Run, message: Message, key: Optional[str] = None) -> Dict[str, Any]:
    """Return the JSON of a webhook: of Slack (also Mattermost's), Teams, PagerDuty, or the generic one.

    Parameters
    ----------
    key
        PagerDuty's routing key.
    """
    subject, text = compose_subject(run, message), compose_text(run, message)
    if style == "slack":  # https://docs.slack.dev/messaging/sending-messages-using-incoming-webhooks
        return {"text": f"*{_escape_slack(subject)}*\n```{_escape_slack(text)}```"}
    if style == "teams":  # a workflow's trigger takes a message with an adaptive card
        blocks = [
            {"type": "TextBlock", "text": subject, "weight": "bolder", "wrap": True},
            {"type": "TextBlock", "text": text, "fontType": "monospace", "wrap": True},
        ]
        schema = "http://adaptivecards.io/schemas/adaptive-card.json"
        card = {"$schema": schema, "type": "AdaptiveCard", "version": "1.4", "body": blocks}
        kind = "application/vnd.microsoft.card.adaptive"
        return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}
    if style == "pagerduty":  # https://developer.pagerduty.com/docs/send-alert-event
        details = {"summary": subject[:1024], "source": run.host, "severity": "error", "custom_details": text}
        action = "resolve" if message.event == RESOLVED else "trigger"
        dedup = f"{run.directory} {message.alert}"[-255:]
        return {"routing_key": key, "event_action": action, "dedup_key": dedup, "payload": details}
    return to_payload(run, message)


def suggest_command(run: Run, message: Message) -> str:
    """Return the command to type next."""
    verb = {"loss_spike": "plot", "grad_norm_spike": "plot", "non_finite": "plot"}.get(
        message.detector, "status"
    )
    return f"slipway {verb} {shlex.quote(run.directory)}"


def draw(values: Sequence[float]) -> str:
    """Draw the last values as a row of bars; what is not finite as a dot."""
    last = values[-_PLOTTED:]
    finite = [value for value in last if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(
        _BARS[round((value - low) * scale)] if math.isfinite(value) else _NO_NUMBER for value in last
    )


def _format_moment(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(moment))


def _escape_slack(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("`", "'")
