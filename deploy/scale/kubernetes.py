"""Pools that are Deployments: their sizes read and set through the scale subresource of the Kubernetes API."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tandem.engine.contracts.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes puts a pod's own
ANSWER_S = 10.0  # a guess
MERGE = "application/merge-patch+json"


class Deployments:
    """The Deployments of one namespace, by pool."""

    def __init__(
        self, names: Mapping[str, str], namespace: str = "", api_server: str = "", token_file: str = ""
    ) -> None:
        """Raises ConfigError where nothing says which API server and namespace: in a pod its own are known."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        self._server = api_server.rstrip("/") or (f"https://{host}:{port}" if host else "")
        own = ACCOUNT / "namespace"
        self._namespace = namespace or (own.read_text().strip() if own.exists() else "")
        if not self._server or not self._namespace:
            raise ConfigError("outside a pod name --api-server (such as `kubectl proxy` gives) and --namespace")
        self._names, self._token = names, Path(token_file) if token_file else ACCOUNT / "token"
        ca = ACCOUNT / "ca.crt"
        self._tls = ssl.create_default_context(cafile=str(ca) if ca.exists() else None)

    def sizes(self) -> dict[str, int]:
        """The replicas that are asked for, by pool. Raises OSError when the API server doesn't answer as it should."""
        return {pool: int(self._call("GET", name)["spec"].get("replicas", 0)) for pool, name in self._names.items()}

    def resize(self, pool: str, number: int) -> None:
        """Asks for so many replicas. A pod that is to go gets SIGTERM, which drains it. Raises OSError."""
        self._call("PATCH", self._names[pool], {"spec": {"replicas": number}})

    def _call(self, method: str, name: str, body: object = None) -> dict[str, Any]:
        path = f"/apis/apps/v1/namespaces/{quote(self._namespace)}/deployments/{quote(name)}/scale"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._server + path, data, {"Content-Type": MERGE}, method=method)
        if self._token.exists():  # read each time: Kubernetes renews it
            request.add_header("Authorization", f"Bearer {self._token.read_text().strip()}")
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S, context=self._tls) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise OSError(f"{method} {path}: {error.code} {error.reason}") from None
        except ValueError as error:
            raise OSError(f"{method} {path}: no JSON: {error}") from None
