// The interop cases of gRPC that apply, by @grpc/grpc-js: node grpc_js_cases.js ADDRESS SMALL LARGE
//
// It needs @grpc/grpc-js alone, found by NODE_PATH. The first case that fails ends it with status 1.
"use strict";
const assert = require("node:assert");
const fs = require("node:fs");
const grpc = require("@grpc/grpc-js");

const [address, smallFile, largeFile] = process.argv.slice(2);
const small = fs.readFileSync(smallFile);
const large = fs.readFileSync(largeFile);
const PREDICT = "/predictor.Predictor/Predict";
const HEALTH = "/grpc.health.v1.Health/";
const REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
const OTHER_MODEL = "no such 100% \u03b1";
const same = (bytes) => bytes;
const client = new grpc.Client(address, grpc.credentials.createInsecure());

function unary(path, content, { metadata = new grpc.Metadata(), deadline = Date.now() + 60_000, on = client } = {}) {
  return new Promise((resolve) => {
    on.makeUnaryRequest(path, same, same, content, metadata, { deadline }, (error, answer) =>
      resolve({ code: error ? error.code : grpc.status.OK, text: error ? error.details : "", answer }));
  });
}

async function answered(path, content, options) {
  const { code, text, answer } = await unary(path, content, options);
  assert.strictEqual(code, grpc.status.OK, text);
  return answer;
}

const cases = {
  async emptyUnary() {
    assert.deepStrictEqual(await answered(HEALTH + "Check", Buffer.alloc(0)), Buffer.from([8, 1]));
  },
  async largeUnary() {
    const [one, many] = [await answered(PREDICT, small), await answered(PREDICT, large)];
    assert.ok(many.length > one.length);
  },
  async compressedUnary() {
    for (const algorithm of [grpc.compressionAlgorithms.gzip, grpc.compressionAlgorithms.deflate]) {
      const packing = new grpc.Client(address, grpc.credentials.createInsecure(), {
        "grpc.default_compression_algorithm": algorithm,
      });
      for (const content of [small, large]) await answered(PREDICT, content, { on: packing });
      packing.close();
    }
  },
  async statuses() {
    const name = Buffer.from(OTHER_MODEL);
    const asked = Buffer.concat([small, Buffer.from([0xa2, 0x06, name.length]), name]);
    const refused = await unary(PREDICT, asked);
    assert.strictEqual(refused.code, grpc.status.NOT_FOUND);
    assert.ok(refused.text.includes(OTHER_MODEL), refused.text);
    assert.strictEqual((await unary(PREDICT, Buffer.from([0xff]))).code, grpc.status.INVALID_ARGUMENT);
    assert.strictEqual((await unary("/no.Such/Method", small)).code, grpc.status.UNIMPLEMENTED);
  },
  async customMetadata() {
    const metadata = new grpc.Metadata();
    metadata.add("x-own", "value");
    metadata.add("x-own-bin", Buffer.from([...Array(256).keys()]));
    await answered(PREDICT, small, { metadata });
  },
  async deadline() {
    const late = await unary(PREDICT, large, { deadline: Date.now() + 1 });
    assert.ok([grpc.status.DEADLINE_EXCEEDED, grpc.status.OK].includes(late.code), late.text);
    const passed = await unary(PREDICT, large, { deadline: Date.now() - 1 });
    assert.strictEqual(passed.code, grpc.status.DEADLINE_EXCEEDED);
  },
  async cancelled() {
    for (let i = 0; i < 20; ++i) {
      await new Promise((resolve) => {
        const call = client.makeUnaryRequest(PREDICT, same, same, large, () => resolve());
        setImmediate(() => call.cancel());
      });
    }
    await answered(PREDICT, small);
  },
  async manyAtOnce() {
    await Promise.all(Array.from({ length: 500 }, () => answered(PREDICT, small)));
  },
  streams() {
    return new Promise((resolve, reject) => {
      const call = client.makeBidiStreamRequest(REFLECT, same, same);
      let answers = 0;
      const ask = () => (answers < 3 ? call.write(Buffer.from([0x3a, 0])) : call.end());
      call.on("data", (answer) => {
        assert.ok(answer.includes("predictor.Predictor"));
        ++answers;
        ask();
      });
      call.on("error", reject);
      call.on("end", () => resolve(assert.strictEqual(answers, 3)));
      ask();
    });
  },
};

async function main() {
  for (const one of Object.values(cases)) await one();
  client.close();
  const { version } = require("@grpc/grpc-js/package.json");
  console.log(`@grpc/grpc-js ${version}: ${Object.keys(cases).length} cases`);
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
