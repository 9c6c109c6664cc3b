"""The Kubernetes API, as the control plane calls it.

lightkube brings the connection: kubeconfig or service account, its token read anew, client
certificates. The calls are made on its HTTP client, since its own methods know no bookmarks, no
deletion of one uid, and no limit of a watch that has fallen silent.
"""

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Literal

import httpx
import orjson
from lightkube.config.client_adapter import AsyncClient, ConnectionParams
from lightkube.config.kubeconfig import KubeConfig, SingleConfig
from lightkube.config.models import User
from lightkube.core.exceptions import ConfigError

from controller.records import Call, Object, Resource
from gateway.records.record import Record

REQUEST_S: Final = 5.0
"""Limit of one call, well below the time for which a Lease stays with its holder."""
SILENCE_S: Final = 15.0
"""After its limit, a watch that says nothing is given up."""
PAGE: Final = 500
"""Objects in one page of a list."""
MAX_PAGES: Final = 2_000
"""Of one list: a million objects. A list that goes on is refused."""
SUBRESOURCES: Final = {"patch_status": "status", "patch_scale": "scale"}


class ApiFailure(Exception):
    """A call that the API did not carry out; the message says why, for logs."""


class Conflict(ApiFailure):
    """The object is of another version or uid, or it exists already: look again."""


class NotFound(ApiFailure):
    """No such object, or no such kind."""


class Invalid(ApiFailure):
    """The API does not take this object."""


class Forbidden(ApiFailure):
    """The service account lacks a right."""


class Expired(ApiFailure):
    """The version from which to watch, or the next page, is too old: list anew."""


class Away(ApiFailure):
    """No answer, or none of use: try later. The call may have been carried out."""


class Listing(Record, frozen=True, kw_only=True):
    """A collection at one moment."""

    objects: tuple[Object, ...]
    version: str
    """From where to watch on."""


Change = tuple[Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"], Object]


def connection(config: KubeConfig | None = None) -> SingleConfig:
    """How to reach the API: a service account's, else kubeconfig's. Raises ValueError, in words."""
    try:
        chosen = (config or KubeConfig.from_env()).get()
    except (ConfigError, OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"no Kubernetes API: {error}") from error
    if chosen is None:
        raise ValueError("no Kubernetes API: kubeconfig names no context")
    # Without a user, as for `kubectl proxy`, lightkube has no client.
    return chosen if chosen.user is not None else chosen._replace(user=User())


class KubeApi:
    """The calls that the control plane makes, on lightkube's HTTP client. All raise ApiFailure."""

    def __init__(self, config: SingleConfig, namespace: str) -> None:
        self.namespace = namespace
        """The controller's own."""
        params = ConnectionParams(timeout=httpx.Timeout(REQUEST_S))
        self._client: httpx.AsyncClient = AsyncClient(config, params)
        self._client.headers["user-agent"] = "sluice-controller"

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def list(self, resource: Resource, *, labels: str = "") -> Listing:
        """All objects of the kind that the label selector matches. Raises Expired, too."""
        params = {"limit": str(PAGE)} | ({"labelSelector": labels} if labels else {})
        kind = {"apiVersion": resource.api_version, "kind": resource.kind}
        objects: list[Object] = []
        try:
            for _ in range(MAX_PAGES):
                page = await self._answer("GET", self._path(resource), params=params)
                # The items may leave out their kind.
                objects.extend(_object(kind | listed) for listed in page["items"] or ())
                if not (following := page["metadata"].get("continue")):
                    version = str(page["metadata"]["resourceVersion"])
                    return Listing(objects=tuple(objects), version=version)
                params["continue"] = following
        except (KeyError, TypeError, AttributeError) as error:
            raise Away(f"no sense in the list of {resource.plural}") from error
        raise Away(f"no end of the list of {resource.plural}")

    async def watch(
        self, resource: Resource, version: str, *, labels: str = "", limit_s: int
    ) -> AsyncGenerator[Change, None]:
        """Changes after a version, until the time limit. Raises Expired, too."""
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(limit_s),
        } | ({"labelSelector": labels} if labels else {})
        limits = httpx.Timeout(REQUEST_S, read=limit_s + SILENCE_S)
        path = self._path(resource)
        try:
            async with self._client.stream("GET", path, params=params, timeout=limits) as response:
                if response.status_code != 200:
                    raise _failure(response.status_code, await response.aread())
                rest = b""
                async for part in response.aiter_bytes():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in filter(None, lines):
                        event = orjson.loads(line)
                        if event["type"] == "ERROR":
                            status = event["object"]
                            raise _failure(status.get("code", 500), orjson.dumps(status))
                        named = event["type"] != "BOOKMARK"
                        yield event["type"], _object(event["object"], named=named)
        except (httpx.HTTPError, httpx.StreamError, OSError, ConfigError) as error:
            raise Away(_words(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Away(f"no sense in the watch of {resource.plural}") from error

    async def get(self, resource: Resource, name: str) -> Object:
        """One object of the own namespace."""
        return _object(await self._answer("GET", self._path(resource, name)))

    async def make(self, call: Call) -> Object:
        """Make a change; returns the object, or what the API answers to a deletion.

        A patch with `metadata.resourceVersion` requires that version. What exists already, or is
        of another version or uid, is a Conflict.
        """
        if call.verb == "create":
            path = self._path(call.resource, namespace=call.namespace)
            return _object(await self._answer("POST", path, body=call.body))
        subresource = SUBRESOURCES.get(call.verb, "")
        path = self._path(call.resource, call.name, subresource, namespace=call.namespace)
        if call.verb != "delete":
            return _object(await self._answer("PATCH", path, body=call.body))
        body = {"preconditions": {"uid": call.uid}} if call.uid else {}
        answer: Object = await self._answer("DELETE", path, body=body)
        return answer

    def _path(self, resource: Resource, *more: str, namespace: str | None = None) -> str:
        root = f"/apis/{resource.group}" if resource.group else "/api"
        space = f"/namespaces/{namespace or self.namespace}" if resource.namespaced else ""
        return "/".join([f"{root}/{resource.version}{space}", resource.plural, *filter(None, more)])

    async def _answer(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        content = None if body is None else orjson.dumps(body)
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        try:
            response = await self._client.request(
                method, path, params=params, content=content, headers={"content-type": kind}
            )
            if response.is_success:
                return orjson.loads(response.content)
        except (httpx.HTTPError, OSError, ConfigError) as error:
            raise Away(_words(error)) from error
        except ValueError as error:
            raise Away(f"no sense in the answer to {method} {path}") from error
        raise _failure(response.status_code, response.content)


def _object(answer: Any, *, named: bool = True) -> Object:
    """What was answered, if it is an object of some version. Raises Away."""
    metadata = answer.get("metadata") if isinstance(answer, dict) else None
    fields = ("resourceVersion", "name")[: 1 + named]
    if isinstance(metadata, dict) and all(isinstance(metadata.get(field), str) for field in fields):
        result: Object = answer
        return result
    raise Away("the API's answer is no object")


def _failure(status: int, body: bytes) -> ApiFailure:
    """What the API's status means here, with its own words."""
    try:
        words = str(orjson.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        words = f"the API answered {status}"
    if status in (401, 403):
        return Forbidden(words)
    if status in (429, 502, 503, 504):
        return Away(words)
    if status >= 500:  # such as of a webhook that fails: of this call alone
        return ApiFailure(words)
    kinds = {404: NotFound, 409: Conflict, 410: Expired}
    return kinds.get(status, Invalid)(words)


def _words(error: Exception) -> str:
    return f"no answer from the API: {str(error) or type(error).__name__}"
