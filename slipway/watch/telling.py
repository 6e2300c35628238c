"""The ways to tell people of alerts: ``watch.tell`` in the configuration and in ``supervisor.json``."""

from typing import Any, Mapping, NamedTuple, Optional, Tuple

COMMAND, WEBHOOK, MAIL, APPRISE = "command", "webhook", "mail", "apprise"
WEBHOOK_STYLES = ("generic", "slack", "teams", "pagerduty")


class Webhook(NamedTuple):
    """A service that takes a POST: files with its URL and with a key, and the form of the body."""

    url_file: Optional[str] = None
    style: str = "generic"
    key_file: Optional[str] = None


class Mail(NamedTuple):
    """A mail server, ``HOST`` or ``HOST:PORT``, the addresses, and a file with the password."""

    server: Optional[str] = None
    to: Tuple[str, ...] = ()
    sender: Optional[str] = None
    user: Optional[str] = None
    password_file: Optional[str] = None


class Alive(NamedTuple):
    """A dead man's switch: a file, and a file with a URL, that are touched while all is well."""

    file: Optional[str] = None
    url_file: Optional[str] = None


class Tell(NamedTuple):
    """All the ways to tell people of one run.

    Attributes
    ----------
    command
        A program and its arguments, which reads the message as JSON.
    apprise_file
        File with the addresses of apprise's services, which the login node alone reaches.
    timeout
        Seconds that one delivery may take.
    every
        Seconds between two looks of a job at its training and at the outbox.
    """

    command: Tuple[str, ...] = ()
    webhook: Webhook = Webhook()
    mail: Mail = Mail()
    apprise_file: Optional[str] = None
    alive: Alive = Alive()
    timeout: float = 10.0
    every: float = 15.0

    def routes(self) -> Tuple[str, ...]:
        """Return the names of the ways that a job can use."""
        used = ((COMMAND, self.command), (WEBHOOK, self.webhook.url_file), (MAIL, self.mail.server))
        return tuple(name for name, way in used if way)


def from_json(content: Mapping[str, Any]) -> Tell:
    """Return the settings that mappings hold; missing ones have their defaults.

    Raises
    ------
    TypeError
        If one is unknown.
    """
    values = dict(content)
    values["command"] = tuple(values.get("command") or ())
    values["webhook"] = Webhook(**values.get("webhook", {}))
    values["mail"] = Mail(**values.get("mail", {}))
    values["mail"] = values["mail"]._replace(to=tuple(values["mail"].to))
    values["alive"] = Alive(**values.get("alive", {}))
    return Tell(**values)
