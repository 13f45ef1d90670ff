// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//   node client.mjs localhost:50051          sends a small batch
//   node client.mjs unix:PATH 2048           sends a batch of 2048 images
//   node client.mjs localhost:50051 --bad    sends a scale of the wrong length
//   node client.mjs gpu1.example:50051 --ca ca.pem --token-file alice.token
import { parseArgs } from "node:util";
import { Client, explain, tensor, values } from "./bngrad.mjs";

const HEIGHT = 8, WIDTH = 8, CHANNELS = 16;
const EPSILON = Math.fround(1e-3);
const MAX_BATCH = 100000;

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

function matches(name, actual, expected, tolerance) {
  const { shape } = actual, found = values(actual);
  if (found.length !== expected.length) throw new Error(`${name} has a wrong size`);
  const largest = expected.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
  const error = found.reduce((most, value, i) => Math.max(most, Math.abs(value - expected[i])), 0) / largest;
  console.log(`${name} (${shape.join(", ")}): largest error ${error.toExponential(2)} of the largest value`);
  return error <= tolerance;
}

function exitWithUsage(reason) {
  if (reason) console.error(reason);
  console.error("usage: node client.mjs TARGET [BATCH] [--bad] [--ca FILE] [--certificate FILE --key FILE] [--token-file FILE]");
  console.error(`BATCH is a whole number from 1 to ${MAX_BATCH}`);
  process.exit(2);
}

function parseArguments() {
  try {
    return parseArgs({
      allowPositionals: true,
      options: {
        bad: { type: "boolean", default: false },
        ca: { type: "string" },
        certificate: { type: "string" },
        key: { type: "string" },
        "token-file": { type: "string" },
      },
    });
  } catch (error) {
    return exitWithUsage(error.message);
  }
}

const { values: options, positionals: [target, batchSize = "2", ...more] } = parseArguments();
const batch = /^[0-9]+$/.test(batchSize) ? Number(batchSize) : 0;
if (target === undefined || more.length || batch < 1 || batch > MAX_BATCH) exitWithUsage();

const inputs = randomInputs(batch);
const shape = [batch, HEIGHT, WIDTH, CHANNELS];
const scaleSize = options.bad ? CHANNELS - 1 : CHANNELS;
const client = new Client(target, { ...options, tokenFile: options["token-file"] });
try {
  const response = await client.call("FusedBatchNormGradV3", {
    y_backprop: tensor(inputs.yBackprop, shape),
    x: tensor(inputs.x, shape),
    scale: tensor(inputs.scale.subarray(0, scaleSize), [scaleSize]),
    reserve_space_1: tensor(inputs.mean, [CHANNELS]),
    reserve_space_2: tensor(inputs.variance, [CHANNELS]),
    epsilon: EPSILON,
  });
  const expected = expectedGradients(inputs);
  const good = [
    matches("x_backprop", response.x_backprop, expected.xBackprop, 2.4e-7),
    matches("scale_backprop", response.scale_backprop, expected.scaleBackprop, 1e-6),
    matches("offset_backprop", response.offset_backprop, expected.offsetBackprop, 1e-6),
  ];
  process.exitCode = good.every(Boolean) ? 0 : 1;
} catch (error) {
  if (error.metadata === undefined) throw error; // not of a call
  const { status, violations } = explain(error);
  console.error(`${status}: ${error.details}`);
  for (const { field, description } of violations) console.error(`field ${field}: ${description}`);
  process.exitCode = 1;
} finally {
  client.close();
}
