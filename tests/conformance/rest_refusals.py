"""Requests over REST that are refused: what is changed of a good one, and the status and sentence of both servers.

A change takes the body's object and may give another one, or bytes.
"""

import json


def _of_input(at=0, **changes):
    """Keys of the input ``at`` that are other ones; None: they are not there."""

    def change(body):
        for key, value in changes.items():
            if value is None:
                del body["inputs"][at][key]
            else:
                body["inputs"][at][key] = value

    return change


def _of_body(**changes):
    return lambda body: body.update(changes)


def _text(text):
    return lambda _: text.encode() if isinstance(text, str) else text


def _with(key, text):
    """A further key of the body, whose value is this text."""
    return lambda body: (json.dumps(body)[:-1] + f',"{key}":{text}}}').encode()


def _first(at, value):
    def change(body):
        body["inputs"][at]["data"][0] = value

    return change


def _binary(at=0, size=8, **more):
    return _of_input(at, data=None, parameters={"binary_data_size": size, **more})


def not_json(size):
    return (
        f"the JSON ({size} bytes) is not valid, or has a number that is larger than a double may be"
    )


DEEP = "the JSON is nested more than 8 deep"
TWICE = "the JSON has an object with the same key twice"
NOT_WHOLE_64 = "input 'id_list_features_values': element 0 of data is not a whole number of 64 bits"
NOT_WHOLE_32 = (
    "input 'id_list_features_lengths': element 0 of data is not a whole number of 32 bits"
)
NOT_A_NUMBER = "input 'float_features': element 0 of data is not a number"
SHAPE = "input 'float_features': shape is not a list of whole numbers"
LISTS = "input 'float_features': the lists of data do not have its shape"
SIZE = "input 'float_features': binary_data_size is not a whole number from 0 on"
DENSE, LENGTHS, VALUES = range(3)  # places of the inputs

REFUSALS = {
    # The text.
    "nothing": (_text(""), not_json(0)),
    "blanks": (_text(" \n"), not_json(2)),
    "cut": (_text('{"inputs": ['), not_json(12)),
    "something behind it": (_text('{"inputs": []} x'), not_json(16)),
    "a zero behind it": (_text(b'{"inputs": []}\x00'), not_json(15)),
    "a mark of the byte order": (_text(b'\xef\xbb\xbf{"inputs": []}'), not_json(17)),
    "two bytes a character": (_text('{"inputs":[]}'.encode("utf-16-le")), not_json(26)),
    "not UTF-8": (_text(b'{"a": "\xff"}'), not_json(10)),
    "half a character": (_text('{"a": "\\ud800"}'), not_json(15)),
    "halves the wrong way": (_text('{"a": "\\ude00\\ud83d"}'), not_json(21)),
    "a control character": (_text('{"a": "\n"}'), not_json(10)),
    "a wrong escape": (_text('{"a": "\\x"}'), not_json(11)),
    "single quotes": (_text("{'inputs': []}"), not_json(14)),
    "a comma too many": (_text('{"inputs": [],}'), not_json(15)),
    "a comma too many in a list": (_text('{"inputs": [1,]}'), not_json(16)),
    "a comment": (_text('{"inputs": [] /**/}'), not_json(19)),
    "a key without quotes": (_text("{inputs: []}"), not_json(12)),
    "NaN": (_text('{"a": NaN}'), not_json(10)),
    "Infinity": (_text('{"a": -Infinity}'), not_json(16)),
    "a zero first": (_text('{"a": 01}'), not_json(9)),
    "a plus": (_text('{"a": +1}'), not_json(9)),
    "a point alone": (_text('{"a": 1.}'), not_json(9)),
    "a large number": (_text('{"a": 1e400}'), not_json(12)),
    "a long number": (_text(f'{{"a": {"9" * 400}}}'), not_json(407)),
    "a key twice": (_text('{"inputs": [], "inputs": []}'), TWICE),
    "a key twice within": (_text('{"inputs": [{"a": 1, "\\u0061": 2}]}'), TWICE),
    "deep": (_text("[" * 9 + "]" * 9), DEEP),
    "deep and cut": (_text("[" * 100_000), DEEP),
    "deep objects": (_text('{"a":' * 9 + "1" + "}" * 9), DEEP),
    "large": (
        _text(" " * (4 * 1024 * 1024 + 1)),
        "the JSON has 4194305 bytes, the limit is 4194304; send large tensors as binary data",
    ),
    # The request's keys.
    "a list": (_text("[]"), "the JSON is not an object"),
    "a number": (_text("1"), "the JSON is not an object"),
    "no inputs": (_text("{}"), "inputs is not a list"),
    "inputs null": (_of_body(inputs=None), "inputs is not a list"),
    "inputs an object": (_of_body(inputs={}), "inputs is not a list"),
    "inputs empty": (_of_body(inputs=[]), "input 'float_features' is missing"),
    "an input a number": (_of_body(inputs=[1]), "inputs[0] is not an object"),
    "id a number": (_of_body(id=1), "id is not a string"),
    "id null": (_of_body(id=None), "id is not a string"),
    "parameters a list": (_of_body(parameters=[]), "parameters is not an object"),
    "a parameter a list": (
        _of_body(parameters={"b": {}, "a": []}),
        "parameter 'a' is not a string, a number, or true or false",
    ),
    "a parameter null": (
        _of_body(parameters={"a": None}),
        "parameter 'a' is not a string, a number, or true or false",
    ),
    "binary_data_output a number": (
        _of_body(parameters={"binary_data_output": 1}),
        "parameter 'binary_data_output' is not true or false",
    ),
    "timeout a text": (
        _of_body(parameters={"timeout": "1"}),
        "parameter 'timeout' is neither an int64_param nor a uint64_param",
    ),
    "timeout with a point": (
        _of_body(parameters={"timeout": 1.0}),
        "parameter 'timeout' is neither an int64_param nor a uint64_param",
    ),
    "timings a number": (
        _of_body(parameters={"timings": 1}),
        "parameter 'timings' is not a bool_param",
    ),
    "timeout negative": (
        _of_body(parameters={"timeout": -1}),
        "parameter 'timeout' is -1, expected 0 to 9223372036854775807",
    ),
    "timeout large": (
        _of_body(parameters={"timeout": 2**63}),
        "parameter 'timeout' is 9223372036854775808, expected 0 to 9223372036854775807",
    ),
    "priority large": (
        _of_body(parameters={"priority": 2**31}),
        "parameter 'priority' is 2147483648, expected 0 to 2147483646",
    ),
    "a sequence": (
        _of_body(parameters={"sequence_id": 5}),
        "parameter 'sequence_id' is not supported: models keep no state between requests",
    ),
    "traffic_key a number": (
        _of_body(parameters={"traffic_key": 5}),
        "parameter 'traffic_key' is not a string",
    ),
    "outputs an object": (_of_body(outputs={}), "outputs is not a list"),
    "an output a text": (_of_body(outputs=["default"]), "outputs[0] is not an object"),
    "an output without name": (_of_body(outputs=[{}]), "outputs[0].name is not a string"),
    "an unknown output": (
        _of_body(outputs=[{"name": "x"}]),
        "output 'x' is unknown; this model has 'default'",
    ),
    "an output twice": (
        _of_body(outputs=[{"name": "default"}, {"name": "default"}]),
        "output 'default' is asked for twice",
    ),
    "binary_data a text": (
        _of_body(outputs=[{"name": "default", "parameters": {"binary_data": "yes"}}]),
        "output 'default': parameter 'binary_data' is not true or false",
    ),
    "classification": (
        _of_body(outputs=[{"name": "default", "parameters": {"classification": 3}}]),
        "parameter 'classification' of output 'default' is not supported",
    ),
    # An input's keys.
    "no name": (_of_input(name=None), "inputs[0].name is not a string"),
    "name a number": (_of_input(VALUES, name=5), "inputs[2].name is not a string"),
    "an unknown name": (
        _of_input(name="x"),
        (
            "input 'x' is unknown; this model has 'float_features', 'id_list_features_lengths', "
            "'id_list_features_values'"
        ),
    ),
    "a name twice": (
        lambda body: body["inputs"].append(body["inputs"][DENSE]),
        "input 'float_features' is given twice",
    ),
    "an input missing": (
        lambda body: body["inputs"].pop(VALUES) and None,
        "input 'id_list_features_values' is missing",
    ),
    "no datatype": (_of_input(datatype=None), "input 'float_features': datatype is not a string"),
    "an unknown datatype": (
        _of_input(datatype="FP64"),
        "float_features has datatype 'FP64', expected FP32",
    ),
    "another datatype": (
        _of_input(LENGTHS, datatype="INT64"),
        "id_list_features_lengths has datatype 'INT64', expected INT32",
    ),
    "no shape": (_of_input(shape=None), SHAPE),
    "shape a number": (_of_input(shape=2), SHAPE),
    "shape with a point": (_of_input(shape=[2.0, 2]), SHAPE),
    "shape true": (_of_input(shape=[True, 2]), SHAPE),
    "shape larger than 64 bits": (_of_input(shape=[2**63, 0]), SHAPE),
    "shape negative": (
        _of_input(shape=[-1, 4]),
        "float_features.shape[0] is -1, expected 0 to 2147483647",
    ),
    "shape of other rank": (
        _of_input(shape=[8]),
        "float_features.shape has 1 dimensions, expected 2",
    ),
    "shape of a high rank": (
        _of_input(shape=[2, 2, 2]),
        "float_features.shape has 3 dimensions, expected 2",
    ),
    "shape without dimensions": (
        _of_input(shape=[]),
        "float_features.shape has 0 dimensions, expected 2",
    ),
    "shape too large": (
        _of_input(shape=[2**31 - 1, 2**31 - 1]),
        "float_features has 8 elements, its shape has 4611686014132420609",
    ),
    "shape does not fit": (
        _of_input(shape=[2, 3]),
        "float_features has 8 elements, its shape has 6",
    ),
    "parameters of an input a text": (
        _of_input(parameters="x"),
        "input 'float_features': parameters is not an object",
    ),
    "shared memory": (
        _of_input(data=None, parameters={"shared_memory_region": "x"}),
        "parameter 'shared_memory_region' of input 'float_features' is not supported",
    ),
    # Data.
    "no data": (
        _of_input(data=None),
        "input 'float_features' has neither data nor binary_data_size",
    ),
    "data an object": (_of_input(data={}), "input 'float_features': data is not a list"),
    "data a text": (_of_input(data="1,2"), "input 'float_features': data is not a list"),
    "rows and numbers": (_of_input(data=[[1, 2, 3, 4], 5]), LISTS),
    "rows too short": (_of_input(data=[[1, 2, 3, 4], [1, 2, 3]]), LISTS),
    "rows too few": (_of_input(data=[[1, 2, 3, 4]]), LISTS),
    "lists in rows": (_of_input(data=[[1, 2, 3, [4]], [1, 2, 3, 4]]), "float_features': element 3"),
    "rows of a vector": (
        _of_input(LENGTHS, data=[[1]]),
        "input 'id_list_features_lengths': the lists of data do not have its shape",
    ),
    "a number a text": (_first(DENSE, "1"), NOT_A_NUMBER),
    "a number true": (_first(DENSE, True), NOT_A_NUMBER),
    "a number an object": (_first(DENSE, {}), NOT_A_NUMBER),
    "a number that float32 has not": (
        _first(DENSE, 1e300),
        (
            "float_features: feature 'dense_0', row 0 is inf, expected only NaN (missing) or a finite "
            "number"
        ),
    ),
    "an id with a point": (_first(VALUES, 1.0), NOT_WHOLE_64),
    "an id null": (_first(VALUES, None), NOT_WHOLE_64),
    "an id true": (_first(VALUES, True), NOT_WHOLE_64),
    "an id a text": (_first(VALUES, "1"), NOT_WHOLE_64),
    "an id of 65 bits": (_first(VALUES, 2**63), NOT_WHOLE_64),
    "an id of 66 bits": (_first(VALUES, -(2**65)), NOT_WHOLE_64),
    "a length of 33 bits": (_first(LENGTHS, 2**31), NOT_WHOLE_32),
    "a length negative": (_first(LENGTHS, -1), "id_list_features_lengths[0] is -1, expected >= 0"),
    # Binary data.
    "binary and data": (
        _of_input(parameters={"binary_data_size": 8}),
        "input 'float_features' has data and binary_data_size, expected only one of the two",
    ),
    "binary without bytes": (
        _binary(),
        "input 'float_features': binary_data_size is 8, the body has 0 bytes left",
    ),
    "binary a text": (_binary(size="8"), SIZE),
    "binary with a point": (_binary(size=8.0), SIZE),
    "binary negative": (_binary(size=-1), SIZE),
    "binary of 64 bits": (_binary(size=2**63), SIZE),
}
"""By what is wrong: the change, and the sentence."""
