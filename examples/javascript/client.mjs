// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//   node client.mjs localhost:50051          sends a small batch
//   node client.mjs unix:PATH 2048           sends a batch of 2048 images
//   node client.mjs localhost:50051 --bad    sends a scale of the wrong length
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const HEIGHT = 8, WIDTH = 8, CHANNELS = 16;
const EPSILON = Math.fround(1e-3);

const definitions = loadSync(["bngrad_protos/v1/batch_norm_grad.proto", "google/rpc/bad_request.proto"], {
  includeDirs: ["../../protos", "../protos"].map((path) => fileURLToPath(new URL(path, import.meta.url))),
  keepCase: true,
  longs: Number,
  enums: String,
  json: true, // unpacks google.protobuf.Any
});
const { BatchNormGradService } = grpc.loadPackageDefinition(definitions).bngrad.v1;

let state = 1;
function random() {
  state = (state * 48271) % 2147483647;
  return state / 2147483647;
}

function randomInputs(batch) {
  const uniform = (size, low, high) => Float32Array.from({ length: size }, () => low + (high - low) * random());
  const size = batch * HEIGHT * WIDTH * CHANNELS;
  const x = uniform(size, -1, 1);
  const sum = new Float64Array(CHANNELS), sumOfSquares = new Float64Array(CHANNELS);
  for (let i = 0; i < size; i++) {
    sum[i % CHANNELS] += x[i];
    sumOfSquares[i % CHANNELS] += x[i] ** 2;
  }
  const m = size / CHANNELS;
  return {
    yBackprop: uniform(size, -1, 1),
    x,
    scale: uniform(CHANNELS, 0.5, 1.5),
    mean: Float32Array.from(sum, (value) => value / m),
    variance: Float32Array.from(sumOfSquares, (value, c) => value / m - (sum[c] / m) ** 2),
  };
}

function expectedGradients({ yBackprop, x, scale, mean, variance }) {
  const m = x.length / CHANNELS;
  const rstd = Float64Array.from(variance, (value) => 1 / Math.sqrt(value + EPSILON));
  const sumDy = new Float64Array(CHANNELS), sumDyXc = new Float64Array(CHANNELS);
  for (let i = 0; i < x.length; i++) {
    const c = i % CHANNELS;
    sumDy[c] += yBackprop[i];
    sumDyXc[c] += yBackprop[i] * (x[i] - mean[c]);
  }
  const xBackprop = Float64Array.from(x, (value, i) => {
    const c = i % CHANNELS;
    return scale[c] * rstd[c] *
      (yBackprop[i] - sumDy[c] / m - (value - mean[c]) * rstd[c] ** 2 * sumDyXc[c] / m);
  });
  return { xBackprop, scaleBackprop: sumDyXc.map((value, c) => rstd[c] * value), offsetBackprop: sumDy };
}

// The host must be little-endian: so is Tensor.data.
function toTensor(values, shape) {
  return { dtype: "DATA_TYPE_FLOAT32", shape, data: Buffer.from(values.buffer, values.byteOffset, values.byteLength) };
}

function matches(name, { shape, data }, expected, tolerance) {
  const values = new Float32Array(Uint8Array.from(data).buffer); // a copy, because data may be unaligned
  if (values.length !== expected.length) throw new Error(`${name} has a wrong size`);
  const largest = expected.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const error = values.reduce((most, value, i) => Math.max(most, Math.abs(value - expected[i])), 0) / largest;
  console.log(`${name} (${shape.join(", ")}): largest error ${error.toExponential(2)} of the largest value`);
  return error <= tolerance;
}

function printError(error) {
  console.error(`${grpc.status[error.code]}: ${error.details}`);
  for (const bytes of error.metadata.get("grpc-status-details-bin")) {
    for (const detail of definitions["google.rpc.Status"].deserialize(bytes).details) {
      for (const { field, description } of detail.field_violations ?? []) {
        console.error(`field ${field}: ${description}`);
      }
    }
  }
}

const [target, option = "2"] = process.argv.slice(2);
if (target === undefined) {
  console.error("usage: node client.mjs TARGET [BATCH | --bad]");
  process.exit(2);
}
const bad = option === "--bad";
const batch = bad ? 2 : Number(option);

const inputs = randomInputs(batch);
const shape = [batch, HEIGHT, WIDTH, CHANNELS];
const scaleSize = bad ? CHANNELS - 1 : CHANNELS;
const request = {
  y_backprop: toTensor(inputs.yBackprop, shape),
  x: toTensor(inputs.x, shape),
  scale: toTensor(inputs.scale.subarray(0, scaleSize), [scaleSize]),
  reserve_space_1: toTensor(inputs.mean, [CHANNELS]),
  reserve_space_2: toTensor(inputs.variance, [CHANNELS]),
  epsilon: EPSILON,
};

const client = new BatchNormGradService(target, grpc.credentials.createInsecure(), {
  "grpc.max_receive_message_length": -1, // unlimited; the default is 4 MiB
});
client.FusedBatchNormGradV3(request, { deadline: Date.now() + 30_000 }, (error, response) => {
  client.close();
  if (error) {
    printError(error);
    process.exitCode = 1;
    return;
  }
  const expected = expectedGradients(inputs);
  const good = [
    matches("x_backprop", response.x_backprop, expected.xBackprop, 2.4e-7),
    matches("scale_backprop", response.scale_backprop, expected.scaleBackprop, 1e-6),
    matches("offset_backprop", response.offset_backprop, expected.offsetBackprop, 1e-6),
  ];
  process.exitCode = good.every(Boolean) ? 0 : 1;
});
