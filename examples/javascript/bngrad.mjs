// A client of bngrad in Node.js, small enough to copy. It needs @grpc/grpc-js, @grpc/proto-loader and the .proto files.
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const definitions = loadSync(["bngrad_protos/v1/batch_norm_grad.proto", "google/rpc/bad_request.proto"], {
  includeDirs: ["../../protos", "../protos"].map((path) => fileURLToPath(new URL(path, import.meta.url))),
  keepCase: true,
  longs: Number,
  enums: String,
  json: true, // unpacks google.protobuf.Any
});
const { BatchNormGradService } = grpc.loadPackageDefinition(definitions).bngrad.v1;

/** A float32 tensor of a request. The host must be little-endian: so is Tensor.data. */
export function tensor(values, shape) {
  return { dtype: "DATA_TYPE_FLOAT32", shape, data: Buffer.from(values.buffer, values.byteOffset, values.byteLength) };
}

/** The elements of a float32 tensor of a response; a copy, because data may be unaligned. */
export function values({ data }) {
  return new Float32Array(Uint8Array.from(data).buffer);
}

/** The name of a status, and the violations of each field: [{ field, description }]. */
export function explain(error) {
  const details = error.metadata.get("grpc-status-details-bin")
    .flatMap((bytes) => definitions["google.rpc.Status"].deserialize(bytes).details ?? []);
  return { status: grpc.status[error.code], violations: details.flatMap((each) => each.field_violations ?? []) };
}

export class Client {
  /** Options: ca, a PEM file of authorities, for TLS; certificate and key, PEM files of this client; tokenFile. */
  constructor(target, { ca, certificate, key, tokenFile } = {}) {
    const read = (path) => (path === undefined ? null : readFileSync(path));
    const credentials = ca === undefined
      ? grpc.credentials.createInsecure()
      : grpc.credentials.createSsl(read(ca), read(key), read(certificate));
    this.token = read(tokenFile)?.toString().trim();
    this.stub = new BatchNormGradService(target, credentials, {
      "grpc.max_receive_message_length": -1, // unlimited; the default is 4 MiB
    });
  }

  /** Calls an op, such as "FusedBatchNormGradV3", with the fields of its request; rejects with an error to `explain`. */
  call(op, request, timeoutMs = 60_000) {
    const metadata = new grpc.Metadata();
    if (this.token !== undefined) metadata.set("authorization", `Bearer ${this.token}`);
    return new Promise((resolve, reject) => {
      const done = (error, response) => (error ? reject(error) : resolve(response));
      this.stub[op](request, metadata, { deadline: Date.now() + timeoutMs }, done);
    });
  }

  close() {
    this.stub.close();
  }
}
