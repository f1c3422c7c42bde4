"""What operators see of each request: a line in the log, a trace."""

from __future__ import annotations

import gzip
import http.server
import io
import json
import re
import threading
from collections.abc import Iterator

import pytest

from app.log import RequestLog
from app.tracing import Tracing
from tests.service import Service, serving, until

pytestmark = pytest.mark.timeout(60)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


def lines(service: Service, request_id: str) -> list[dict]:
    found = [json.loads(line) for line in service.log().splitlines() if line.startswith("{")]
    return [line for line in found if line["request_id"] == request_id]


def line(service: Service, request_id: str) -> dict:
    until(lambda: lines(service, request_id))
    (one,) = lines(service, request_id)
    return one


def test_each_request_is_one_line_of_json(obedient: Service) -> None:
    body = {"inputs": [1, {"do": "raise", "n": 1}, {"do": "sleep", "seconds": 0.05}]}
    assert obedient.client.post("/infer", json=body, headers={"x-request-id": "a line"}).status_code == 207
    found = line(obedient, "a line")
    assert (found["path"], found["status"], found["items"], found["failed"]) == ("/infer", 207, 3, 1)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", found["time"])
    assert 50 <= found["forward_ms"] <= found["total_ms"]
    assert found["queue_ms"] >= 0
    assert found["bytes_in"] == len(json.dumps(body, separators=(",", ":")))
    assert found["bytes_out"] > 10
    assert "error" not in found
    assert "trace_id" not in found


def test_a_refused_request_is_a_line_with_its_error(obedient: Service) -> None:
    obedient.client.post(
        "/infer", content=b"{", headers={"x-request-id": "refused", "content-type": "application/json"}
    )
    found = line(obedient, "refused")
    assert (found["status"], found["error"]) == (400, "malformed-body")
    headers = {"x-request-id": "encoded", "content-encoding": "br", "content-type": "application/json"}
    obedient.client.post("/infer", content=b"{}", headers=headers)  # which the door refuses
    found = line(obedient, "encoded")
    assert (found["status"], found["error"]) == (415, "unsupported-media-type")
    before = obedient.metric('phalanx_rejected_requests_total{reason="model-error"}')
    headers = {"x-request-id": "none succeeded"}
    obedient.client.post("/infer", json={"inputs": [{"do": "raise"}]}, headers=headers)
    found = line(obedient, "none succeeded")
    assert (found["status"], found["error"], found["failed"]) == (500, "model-error", 1)
    assert obedient.metric('phalanx_rejected_requests_total{reason="model-error"}') == before + 1
    headers = {"x-request-id": "forged"}  # U+2028, for some readers the end of a line
    obedient.client.post("/v2/models/%E2%80%A8%7B%7D%0A%1B/infer", content=b"{}", headers=headers)
    assert line(obedient, "forged")["path"] == "/v2/models/%E2%80%A8%7B%7D%0A%1B/infer"
    headers = {"x-request-id": "streamed", "accept": "application/x-ndjson"}
    obedient.client.post("/infer", json={"inputs": [1, 2]}, headers=headers)
    assert line(obedient, "streamed")["items"] == 2


def test_a_terminal_gets_words() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    import asyncio

    from app.log import Entry

    async def write() -> str:
        terminal = Terminal()
        log = RequestLog(terminal)
        log.write(Entry("r1", "/infer", 503, "draining", 3, 4, 1.0, 1.25, None, TRACE))
        log.write(Entry("r3 status=200", "/v2/\x1b]0;x\n2026", 404, None, 3, 4, 1.0, 1.25, None, None))
        log.write(Entry("r2", "/infer", 200, None, 3, 4, 1.0, 1.25, None, None))
        log.flush()
        return terminal.getvalue()

    first, forged, second = asyncio.run(write()).splitlines()
    assert first.endswith(
        f" request_id=r1 path=/infer status=503 error=draining total_ms=250.0 bytes_in=3 bytes_out=4 trace_id={TRACE}"
    )
    assert ' request_id="r3 status=200" path=/v2/%1B%5D0%3Bx%0A2026 status=404 ' in forged
    assert " request_id=r2 " in second


@pytest.mark.long
def test_the_log_of_requests_can_be_turned_off() -> None:
    with serving("Obedient", ranks=1, log_requests="false") as service:
        assert service.outputs([1]) == [1]
        assert service.stop() == 0
        assert '"request_id"' not in service.log()


# ---- traces


def test_a_trace_goes_on_in_the_answer_and_the_log(obedient: Service) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "traced"}
    answer = obedient.client.post("/infer", json={"inputs": [1]}, headers=headers)
    version, trace_id, span_id, flags = answer.headers["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    assert re.fullmatch("[0-9a-f]{16}", span_id)
    assert span_id != PARENT
    assert line(obedient, "traced")["trace_id"] == TRACE


@pytest.mark.parametrize(
    "header",
    [
        "",
        "junk",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{TRACE}-01",
    ],
)
def test_a_traceparent_that_is_none_is_left_aside(header: str) -> None:
    assert Tracing().begin("/infer", header.encode()) is None


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter sends."""

    spans: list = []  # noqa: RUF012 - one for all requests

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        for resource in message.resource_spans:
            names = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans.extend((names["service.name"], span) for span in scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Collector]]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the extra phalanx[otel] is missing")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Collector.spans.clear()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield Collector
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.long
def test_spans_show_queue_steps_forwards_of_each_rank_and_collect(collector: type[Collector]) -> None:
    with serving("Obedient", ranks=2) as service:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"inputs": [{"do": "sleep", "seconds": 0.05}] * 4}
        answer = service.client.post("/infer", json=body, headers=headers)
        own = answer.headers["traceparent"].split("-")[2]
        assert service.client.post("/infer", json={"inputs": [1]}).headers["traceparent"].split("-")[1] != TRACE
        assert service.stop() == 0  # which sends what has not been sent
    spans = [(name, span) for name, span in collector.spans if span.trace_id.hex() == TRACE]
    assert {name for name, _ in spans} == {"phalanx"}
    by_name: dict[str, list] = {}
    for _, span in spans:
        by_name.setdefault(span.name, []).append(span)
    assert {name: len(found) for name, found in by_name.items()} == {
        "POST /infer": 1, "queue": 1, "step": 1, "forward": 2, "collect": 1
    }  # fmt: skip
    (root,), (step,) = by_name["POST /infer"], by_name["step"]
    assert (root.parent_span_id.hex(), root.span_id.hex()) == (PARENT, own)
    assert step.parent_span_id == root.span_id
    for forward in by_name["forward"]:
        assert forward.parent_span_id == step.span_id
        assert forward.end_time_unix_nano - forward.start_time_unix_nano >= 100e6
    for _, span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1e6
    ranks = {
        attribute.value.int_value
        for forward in by_name["forward"]
        for attribute in forward.attributes
        if attribute.key == "phalanx.rank"
    }
    assert ranks == {0, 1}
