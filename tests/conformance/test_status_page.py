"""The status page: one style and one script in both servers, a form that sends raw values, and what may ask for scores."""

import json
import re
import urllib.request

import numpy as np

from tessera.report_page import page_style
from tessera.serving.protocol import inference_pb2 as ipb
from tessera.serving.server.front.page_texts import page_policy, page_script, request_form
from tests.browser import needs_chromium, with_browser
from tests.conformance.conformance_harness import TIMEOUT_S
from tests.conformance.rest_calls import RestClient, rest_request
from tests.kserve_messages import infer_request

INFER = "/v2/models/ranker/infer"
STAGES = ("decode", "queue", "assemble", "transfer", "forward", "split")
COUNTS = {"batch_requests": 1, "batch_samples": 2}


def test_the_page_is_that_of_both_servers_and_allows_nothing_else(server):
    with urllib.request.urlopen(f"http://{server.http_address}/", timeout=TIMEOUT_S) as reply:
        text, policy = reply.read().decode(), reply.headers["Content-Security-Policy"]
    assert policy == page_policy()
    assert f"<style>{page_style()}</style>" in text
    assert f"<script>{page_script()}</script>" in text
    assert request_form() in text
    assert not re.search(r'\s(style|on\w+|src)="', text), "the policy would not let it work"
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    assert '<tr data-model="ranker" data-version="3" data-state="ready">' in text
    for part in ("live-models", "live-more", "live-foot", "stale"):
        assert text.count(f'id="{part}"') == 1
    tables = text.count("<table>")
    assert tables == text.count('<div class="wide" tabindex="0" role="region" aria-label="')


def test_the_config_tells_the_features_in_their_order(server, in_process):
    with RestClient(server.http_address) as rest:
        parameters = rest.call("GET", "/v2/models/ranker/config").json["parameters"]
    schema = in_process.manifest.schema
    assert json.loads(parameters["features"]["string_value"]) == {
        "float_features": list(schema.dense_features),
        "id_list_features": [feature.name for feature in schema.group("id_list")],
    }


def test_an_answer_tells_where_its_time_went_if_it_is_asked(server, drawn):
    body = json.loads(rest_request(infer_request(drawn.samples(2)))[0])
    with RestClient(server.http_address) as rest:
        assert "parameters" not in rest.infer(body).json
        for asked in (False, True):
            found = rest.infer({**body, "parameters": {"timings": asked}}).json.get("parameters")
            names = {f"{stage}_us" for stage in STAGES}
            assert (set(found) if asked else found) == ((names | set(COUNTS)) if asked else None)
        assert {name: found[name] for name in COUNTS} == COUNTS
        assert all(found[name] >= 0 for name in names)
        reply = rest.infer({**body, "parameters": {"timings": "yes"}})
    told = {"error": "parameter 'timings' is not a bool_param"}
    assert (reply.status, reply.json) == (400, told)
    message = infer_request(drawn.samples(2))
    message.parameters["timings"].bool_param = True
    call = server.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    answer = ipb.ModelInferResponse.FromString(call(message.SerializeToString(), timeout=TIMEOUT_S))
    assert set(answer.parameters) == names | set(COUNTS)
    assert answer.parameters["batch_samples"].int64_param == 2


def test_of_pages_only_the_server_s_own_may_ask_for_scores(server, drawn):
    body = rest_request(infer_request(drawn.samples(1)))[0]
    own = server.http_address
    port = own.rpartition(":")[2]
    refused = "a request with an Origin comes from a web page, and is not heard"
    for host, origin, path, status in (
        (own, f"http://{own}", INFER, 200),
        (f"localhost:{port}", f"http://localhost:{port}", INFER, 200),
        ("[::1]:80", "http://[::1]:80", INFER, 200),
        ("[::1]", "http://[::1]", INFER, 200),
        # Behind TLS a name is held against a certificate.
        ("ranker.example", "https://ranker.example", INFER, 200),
        # A name that whoever wrote the page may have pointed here.
        ("ranker.example", "http://ranker.example", INFER, 403),
        (f"127.0.0.1.example:{port}", f"http://127.0.0.1.example:{port}", INFER, 403),
        # Other pages.
        (own, "http://127.0.0.1:1", INFER, 403),
        (own, "http://example", INFER, 403),
        (own, "null", INFER, 403),
        (own, "", INFER, 403),
        (own, own, INFER, 403),
        (own, f"http://{own}/", INFER, 403),
        ("", "http://", INFER, 403),
    ):
        with RestClient(own) as rest:
            rest.connection.putrequest("POST", path, skip_host=True)
            for name, value in (("Host", host), ("Origin", origin), ("Content-Length", len(body))):
                rest.connection.putheader(name, str(value))
            rest.connection.endheaders()
            if status == 200:
                rest.connection.send(body)
            reply = rest.connection.getresponse()
            told = json.loads(reply.read())
            assert (reply.status, told.get("error")) == (
                status,
                None if status == 200 else refused,
            ), (host, origin)


FILL = """
((values) => {
  for (const label of document.querySelectorAll('#ask-features label')) {
    label.querySelector('input').value = values[label.firstChild.textContent] || '';
  }
  document.querySelector('#ask-form button').click();
})(%s)
"""
SAID = "document.querySelector('#ask-answer').innerText"
CELLS = """
[...document.querySelectorAll('#ask-answer tr')].map((row) =>
  [...row.children].map((cell) => cell.innerText))
"""


def strings(schema, bags):
    """A sample's request: its ids as strings, as a form has them, or as the numbers that they name."""
    message = ipb.ModelInferRequest(model_name="ranker")
    dense = message.inputs.add(name="float_features", datatype="FP32")
    dense.shape.extend([1, len(schema.dense_features)])
    dense.contents.fp32_contents.extend([1.5, np.nan, -2.0, np.nan])
    names = [feature.name for feature in schema.group("id_list")]
    lengths = message.inputs.add(name="id_list_features_lengths", datatype="INT32")
    lengths.shape.append(len(names))
    lengths.contents.int_contents.extend(len(bags.get(name, ())) for name in names)
    values = [value.encode() for name in names for value in bags.get(name, ())]
    ids = message.inputs.add(name="id_list_features_values", datatype="BYTES")
    ids.shape.append(len(values))
    ids.contents.bytes_contents.extend(values)
    return message


@needs_chromium
def test_a_person_sends_raw_values_from_the_page_and_sees_scores_and_timings(server, in_process):
    schema = in_process.manifest.schema
    message = strings(schema, {"user": ["a, b"], "item": ["3", "-4"], "history": ["x", "y"]})
    call = server.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    content = call(message.SerializeToString(), timeout=TIMEOUT_S)
    answer = ipb.ModelInferResponse.FromString(content)
    (score,) = np.frombuffer(answer.raw_output_contents[0], "<f4")
    values = {"dense_0": "1.5", "dense_2": "-2"}
    values |= {"user": r"a\, b", "item": "3, -4", "history": "x,y"}
    bad = {"dense_1": "<img src=x onerror=alert(1)>"}
    unknown = {"genre": "77"}

    async def look(page):
        await page.open(f"http://{server.http_address}/", width=400)
        await page.value("document.getElementById('ask').open = true")
        fields = "[...document.querySelectorAll('#ask-features label')].map((l) => l.innerText)"
        await page.until(f"{fields}.length > 0")
        names = await page.value(fields)
        await page.value("document.getElementById('live-models').dataset.old = 'yes'")
        await page.value(FILL % json.dumps(values))
        await page.until(f"{SAID}.includes('Scores')")
        cells = await page.value(CELLS)
        width = await page.value("document.documentElement.scrollWidth")
        refusals = []
        for wrong, part in ((bad, "not a number"), (unknown, "genre")):
            await page.value(FILL % json.dumps(wrong))
            await page.until(f"{SAID}.includes({part!r})")
            refusals.append(await page.value(SAID))
        # The figures are fresh, and what was written into the form is still there.
        await page.until("!document.getElementById('live-models').dataset.old")
        kept = "[...document.querySelectorAll('#ask-features input')].map((i) => i.value).join('')"
        assert await page.value(kept) == "77"
        assert await page.value("document.images.length") == 0
        return names, cells, width, refusals

    names, cells, width, refusals = with_browser(look)
    assert names == [*schema.dense_features, *(f.name for f in schema.group("id_list"))]
    assert cells[:2] == [["output", "score"], ["default", repr(float(score))]]
    assert [row[0] for row in cells[2:]] == ["stage", *STAGES]
    assert all(int(row[1]) >= 0 for row in cells[3:])
    assert width == 400
    assert refusals[0] == 'dense_1: "<img src=x onerror=alert(1)>" is not a number'
    assert "77" in refusals[1]
