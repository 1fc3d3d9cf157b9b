"""A client of the API server. lightkube configures and authenticates it, and is imported only here.

Objects are plain dictionaries, because typed clients refuse some valid files (`cpu: 32`, a number).
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .pods import Object

_VERSIONS = {"IPUJob": "graphcore.ai/v1alpha1"}  # by kind; Kubernetes' own kinds have "v1"
_TIMEOUT = 30  # seconds for an answer, except in watches and logs


class Refused(Exception):
    """An error: the API server refused a request. `status` is HTTP's: 409 conflict, 404 not found."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Unreachable(Exception):
    """An error: no cluster is configured, or it doesn't answer."""


class Cluster:
    """A client of the cluster of this process's pod, else of $KUBECONFIG, else of ~/.kube/config. Methods raise
    `Refused` or `Unreachable`; the constructor `Unreachable`, if no cluster is configured."""

    def __init__(self, transport: Any = None) -> None:
        try:
            import httpx2
            from lightkube import KubeConfig
            from lightkube.config.client_adapter import Client, ConnectionParams
            from lightkube.core.exceptions import ConfigError
        except ImportError:
            raise Unreachable(
                'lightkube is not installed\n  fix: pip install ".[kubernetes]" in the folder of Pando\'s source'
            ) from None
        try:
            config = KubeConfig.from_env().get()
            if config is None:
                raise ConfigError("the configuration file has no current context")
            timeout = httpx2.Timeout(_TIMEOUT)
            self._http = Client(config, ConnectionParams(timeout=timeout, transport=transport))
        except (ConfigError, OSError, ValueError, KeyError, TypeError) as error:
            fix = "set KUBECONFIG to your cluster's file; or ipujob run FILE --local, which needs no cluster"
            raise Unreachable(f"no cluster is configured: {error}\n  fix: {fix}") from None
        self._error, self._forever = httpx2.HTTPError, httpx2.Timeout(_TIMEOUT, read=None)
        self.namespace, self.server = config.namespace, config.cluster.server

    def list(
        self, kind: str, namespace: str | None = None, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """Return the objects of a kind that match the selectors, in one namespace or in all (None)."""
        params = {"labelSelector": labels, "fieldSelector": fields}
        answer = self._call("GET", _kind_path(kind, namespace), params=params)
        return [{"apiVersion": _VERSIONS.get(kind, "v1"), "kind": kind, **item} for item in answer["items"]]

    def watch(self, kind: str, namespace: str | None = None, labels: str = "") -> Iterator[str]:
        """Yield a line of JSON for each object of a kind, then for each change, for up to five minutes."""
        params = {"watch": "1", "timeoutSeconds": "300", "labelSelector": labels}
        with self._stream("GET", _kind_path(kind, namespace), params=params, timeout=self._forever) as answer:
            yield from answer.iter_lines()

    def create(self, new: Object) -> Object:
        """Create an object, and return it with the fields that the API server added."""
        return self._call("POST", _kind_path(new["kind"], new["metadata"]["namespace"]), json=new)

    def delete(self, existing: Object, orphan: bool = False) -> None:
        """Delete an object and, unless `orphan`, those that it owns. Raises: Refused (404, 409), if it is gone"""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["preconditions"] = {"uid": existing["metadata"]["uid"]}
        options["propagationPolicy"] = "Orphan" if orphan else "Background"
        self._call("DELETE", _object_path(existing), json=options)

    def patch_status(self, existing: Object, patch: Object) -> None:
        """Merge a patch into an object's status. Raises: Refused (409), if `existing` is out of date."""
        body = {"metadata": {"resourceVersion": existing["metadata"]["resourceVersion"]}, "status": patch}
        headers = {"Content-Type": "application/merge-patch+json"}
        self._call("PATCH", f"{_object_path(existing)}/status", json=body, headers=headers)

    def logs(self, pod: Object, follow: bool = False, previous: bool = False) -> Iterator[str]:
        """Yield the lines of the log of a pod's worker (`previous`: before its container's restart)."""
        container = pod["spec"]["containers"][0]["name"]
        params = {"container": container, "follow": str(follow).lower(), "previous": str(previous).lower()}
        path = f"{_object_path(pod)}/log"
        with self._stream("GET", path, params=params, timeout=self._forever) as answer:
            yield from answer.iter_lines()

    def _call(self, method: str, path: str, **request: Any) -> Any:
        """Send a request, and return the JSON value of its response."""
        with self._stream(method, path, **request) as answer:
            answer.read()
            return answer.json()

    @contextmanager
    def _stream(self, method: str, path: str, **request: Any) -> Iterator[Any]:
        """Send a request; yield its response, with an unread body. Raises: Refused or Unreachable."""
        try:
            with self._http.stream(method, path, **request) as answer:
                if answer.is_error:
                    answer.read()
                    raise _refused_error(answer.status_code, answer.text)
                yield answer
        except self._error as error:
            reason = error or type(error).__name__
            raise Unreachable(f"the cluster at {self.server} doesn't answer: {reason}") from None


def _refused_error(status: int, text: str) -> Refused:
    """Return the error for an HTTP status and body; with a fix, if the CRD or rights are missing."""
    try:
        message = json.loads(text)["message"]
    except (ValueError, KeyError, TypeError):
        message = text.strip() or "no reason given"
    unknown = ("404 page not found", "could not find the requested resource")
    if status == 404 and any(words in message for words in unknown):
        message = (
            "the cluster knows no IPUJobs\n  fix: ipujob manifest | kubectl create -f -, with an administrator's "
            "rights; or ipujob render FILE | kubectl apply -f -"
        )
    elif status in (401, 403):
        message = f"not allowed: {message}\n  fix: ask for rights to ipujobs and pods in this namespace"
    return Refused(status, message)


def _kind_path(kind: str, namespace: str | None) -> str:
    """Return the URL path of all objects of a kind, in one namespace or in all (None)."""
    api = f"apis/{_VERSIONS[kind]}" if kind in _VERSIONS else "api/v1"
    return f"{api}/namespaces/{namespace}/{kind.lower()}s" if namespace else f"{api}/{kind.lower()}s"


def _object_path(existing: Object) -> str:
    return f"{_kind_path(existing['kind'], existing['metadata']['namespace'])}/{existing['metadata']['name']}"
