"""CORS, TLS and gzip, asked for by option and not otherwise."""

from __future__ import annotations

import gzip
import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from redis_tls import Certificates, make_certificates
from router_in_thread import VOCAB_SIZE, RouterInThread
from waiting import PATIENCE_S

from stand_in_node import StandInNode
from tandem.engine.contracts.config import WebOptions
from tandem.engine.contracts.errors import ConfigError
from tandem.router.http.around import tls_settings

PAGE = {"Origin": "https://page.example"}
BODY = {"prompt": "the fox", "max_tokens": 8, "stream": True}


@pytest.fixture(scope="module")
def node() -> Iterator[StandInNode]:
    node = StandInNode(vocab_size=VOCAB_SIZE).start()
    yield node
    node.stop()


# README says: "`--allowed-origins` lets web pages ask"
def test_pages_that_may_ask(folder: Path, node: StandInNode) -> None:
    web = WebOptions(allowed_origins=("https://page.example",), allow_credentials=True)
    asks = {**PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with RouterInThread(folder, (node.address,), web=web, api_key="sk-1") as router:
        router.wait_ready()
        allowed = router.client.options("/v1/completions", headers=asks)
        assert (allowed.status_code, allowed.headers["access-control-allow-credentials"]) == (200, "true")
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert router.client.options("/v1/completions", headers=asks | {"Origin": "https://x"}).status_code == 400
        answer = router.client.post(
            "/v1/completions", json=BODY, headers={**PAGE, "Authorization": "Bearer sk-1", "X-Request-Id": "a"}
        )
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["access-control-allow-origin"] == PAGE["Origin"]
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
        refused = router.client.post("/v1/completions", json=BODY, headers=PAGE)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE["Origin"])
    with RouterInThread(folder, (node.address,)) as router:
        assert router.client.options("/v1/completions", headers=asks).status_code == 405
        assert "access-control-allow-origin" not in router.client.get("/health", headers=PAGE).headers


def test_whole_answers_are_compressed_and_streams_are_not(folder: Path, node: StandInNode) -> None:
    long = {"prompt": "the fox", "max_tokens": 200, "logprobs": 2}
    with RouterInThread(folder, (node.address,), web=WebOptions(gzip_min_bytes=500)) as router:
        router.wait_ready()
        for path in ("/v1/completions", "/openapi.json"):
            method = "GET" if path == "/openapi.json" else "POST"
            answer = router.client.request(method, path, json=long if method == "POST" else None)
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.json()
            plain = router.client.request(
                method, path, json=long if method == "POST" else None, headers={"Accept-Encoding": "identity"}
            )
            assert "content-encoding" not in plain.headers
        assert "content-encoding" not in router.client.get("/health").headers
        streamed = router.client.post("/v1/completions", json=BODY)
        assert "content-encoding" not in streamed.headers
        assert streamed.text.count("data: ") == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_bodies_that_are_compressed(folder: Path, node: StandInNode, path: str) -> None:
    packed = gzip.compress(json.dumps({"prompt": "the fox"}).encode())
    bomb = gzip.compress(b" " * 50_000_000)
    with RouterInThread(folder, (node.address,), max_body_bytes=100_000) as router:
        router.wait_ready()

        def ask(body: bytes, encoding: str = "gzip") -> int:
            return router.client.post(path, content=body, headers={"Content-Encoding": encoding}).status_code

        assert [ask(packed), ask(packed[:-9]), ask(b"{}"), ask(b"")] == [200, 400, 400, 400]
        assert [ask(bomb), ask(packed, "br"), ask(packed, "gzip, gzip"), ask(b'{"prompt": "a"}', "identity")] == [
            413, 415, 415, 200,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    return make_certificates(tmp_path_factory.mktemp("certificates"))


# README says: "HTTPS by `--ssl-certfile` and `--ssl-keyfile`"
@pytest.mark.parametrize("wants_certificates", [False, True])
def test_https(folder: Path, node: StandInNode, certificates: Certificates, wants_certificates: bool) -> None:
    web = WebOptions(
        ssl_certfile=str(certificates.certificate("server")),
        ssl_keyfile=str(certificates.key("server")),
        ssl_ca_certs=str(certificates.ca) if wants_certificates else "",
        ssl_cert_reqs=2 if wants_certificates else 0,
    )
    context = ssl.create_default_context(cafile=str(certificates.ca))
    with RouterInThread(folder, (node.address,), web=web) as router:
        url = router.url.replace("http://", "https://")
        if wants_certificates:
            with pytest.raises(httpx.HTTPError), httpx.Client(verify=context) as stranger:
                stranger.get(f"{url}/health")
            context.load_cert_chain(certificates.certificate("client"), certificates.key("client"))
        router.client = httpx.Client(base_url=url, verify=context, timeout=PATIENCE_S)
        router.wait_ready()
        assert router.client.post("/v1/completions", json=BODY).text.endswith("data: [DONE]\n\n")
        assert router.client.post("/v1/completions", json=BODY | {"stream": False}).status_code == 200
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"{router.url}/health")
        with router.client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 400}) as left:
            next(left.iter_raw())
        router.wait_idle()


def test_certificates_that_can_not_be_used(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    for web, complaint in [
        (WebOptions(ssl_keyfile="k"), "--ssl-certfile"),
        (WebOptions(ssl_certfile="c", ssl_cert_reqs=2), "--ssl-ca-certs"),
        (WebOptions(ssl_certfile=str(tmp_path / "none")), "No such file"),
        (WebOptions(ssl_certfile=str(junk)), "junk.pem"),
    ]:
        with pytest.raises(ConfigError, match=complaint):
            tls_settings(web)
