"""An OTLP receiver: prints its port, and then a line of JSON for each span it receives."""

from __future__ import annotations

import json
import signal
from concurrent import futures

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as pb_grpc


class Receiver(pb_grpc.TraceServiceServicer):
    def Export(  # noqa: N802 - the protocol's name
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            resource = {each.key: each.value.string_value for each in resource_spans.resource.attributes}
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    values = {each.key: each.value for each in span.attributes}
                    fields = {
                        "service": resource.get("service.name"),
                        "name": span.name,
                        "kind": span.kind,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "start": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "status": span.status.code,
                        "code": values["rpc.grpc.status_code"].int_value if "rpc.grpc.status_code" in values else None,
                    }
                    print(json.dumps(fields), flush=True)
        return pb.ExportTraceServiceResponse()


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    pb_grpc.add_TraceServiceServicer_to_server(Receiver(), server)  # type: ignore[no-untyped-call]
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    signal.sigwait({signal.SIGTERM})
    server.stop(None).wait()


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
