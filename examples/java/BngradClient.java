// A client of bngrad in Java 17, small enough to copy. It needs grpc-java and the code that protoc makes of the .proto files.
import bngrad.v1.BatchNormGradServiceGrpc;
import bngrad.v1.BatchNormGradServiceGrpc.BatchNormGradServiceBlockingStub;
import bngrad.v1.DataType;
import bngrad.v1.FusedBatchNormGradV3Request;
import bngrad.v1.FusedBatchNormGradV3Response;
import bngrad.v1.ReserveSpace2Kind;
import bngrad.v1.Tensor;
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.protobuf.UnsafeByteOperations;
import google.rpc.BadRequestOuterClass.BadRequest;
import google.rpc.BadRequestOuterClass.BadRequest.FieldViolation;
import google.rpc.BadRequestOuterClass.Status;
import io.grpc.ChannelCredentials;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.stub.MetadataUtils;
import java.io.File;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;

/** Calls a server; threads may share it. */
public final class BngradClient implements AutoCloseable {
  /** Paths of PEM files and of a token, each may be null: with authorities (ca), connections use TLS. */
  public record Options(String ca, String certificate, String key, String tokenFile) {}

  /** The outputs of FusedBatchNormGradV3 and FusedBatchNormGradV2. */
  public record Gradients(Tensor xBackprop, Tensor scaleBackprop, Tensor offsetBackprop) {}

  private static final long TIMEOUT_S = 60;

  private final ManagedChannel channel;
  private final BatchNormGradServiceBlockingStub stub;

  public BngradClient(String target, Options options) throws IOException {
    channel = Grpc.newChannelBuilder(target, credentials(options))
        .maxInboundMessageSize(Integer.MAX_VALUE) // the default is 4 MiB
        .build();
    Metadata metadata = new Metadata();
    if (options.tokenFile() != null) {
      String token = Files.readString(Path.of(options.tokenFile())).strip();
      metadata.put(Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER), "Bearer " + token);
    }
    stub = BatchNormGradServiceGrpc.newBlockingStub(channel)
        .withInterceptors(MetadataUtils.newAttachHeadersInterceptor(metadata));
  }

  /** Calls FusedBatchNormGradV3, with attributes such as {@code epsilon(1e-3f)}; {@link #violations} explains errors. */
  @SafeVarargs
  public final Gradients fusedBatchNormGradV3(
      Tensor yBackprop, Tensor x, Tensor scale, Tensor mean, Tensor variance,
      Consumer<FusedBatchNormGradV3Request.Builder>... attributes) {
    FusedBatchNormGradV3Request.Builder request = FusedBatchNormGradV3Request.newBuilder()
        .setYBackprop(yBackprop).setX(x).setScale(scale).setReserveSpace1(mean).setReserveSpace2(variance);
    for (Consumer<FusedBatchNormGradV3Request.Builder> attribute : attributes) attribute.accept(request);
    FusedBatchNormGradV3Response response = stub().fusedBatchNormGradV3(request.build());
    return new Gradients(response.getXBackprop(), response.getScaleBackprop(), response.getOffsetBackprop());
  }

  public static Consumer<FusedBatchNormGradV3Request.Builder> epsilon(float value) {
    return request -> request.setEpsilon(value);
  }

  public static Consumer<FusedBatchNormGradV3Request.Builder> dataFormat(String value) {
    return request -> request.setDataFormat(value);
  }

  public static Consumer<FusedBatchNormGradV3Request.Builder> isTraining(boolean value) {
    return request -> request.setIsTraining(value);
  }

  public static Consumer<FusedBatchNormGradV3Request.Builder> reserveSpace2Kind(ReserveSpace2Kind value) {
    return request -> request.setReserveSpace2Kind(value);
  }

  /** The generated client, for the other ops. */
  public BatchNormGradServiceBlockingStub stub() {
    return stub.withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS);
  }

  @Override
  public void close() {
    channel.shutdownNow();
  }

  /** A float32 tensor of a request. */
  public static Tensor tensor(float[] values, long... shape) {
    ByteBuffer data = ByteBuffer.allocate(values.length * Float.BYTES).order(ByteOrder.LITTLE_ENDIAN);
    data.asFloatBuffer().put(values);
    Tensor.Builder tensor = Tensor.newBuilder().setDtype(DataType.DATA_TYPE_FLOAT32);
    for (long length : shape) tensor.addShape(length);
    return tensor.setData(UnsafeByteOperations.unsafeWrap(data)).build();
  }

  /** The elements of a float32 tensor of a response. */
  public static float[] values(Tensor tensor) {
    float[] values = new float[tensor.getData().size() / Float.BYTES];
    tensor.getData().asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asFloatBuffer().get(values);
    return values;
  }

  /** What the status of a failed call says about the fields of its request. */
  public static List<FieldViolation> violations(StatusRuntimeException error) throws InvalidProtocolBufferException {
    List<FieldViolation> violations = new ArrayList<>();
    Metadata.Key<byte[]> key = Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
    byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(key);
    if (details == null) return violations;
    for (Any detail : Status.parseFrom(details).getDetailsList()) {
      if (detail.is(BadRequest.class)) violations.addAll(detail.unpack(BadRequest.class).getFieldViolationsList());
    }
    return violations;
  }

  private static ChannelCredentials credentials(Options options) throws IOException {
    if (options.ca() == null) return InsecureChannelCredentials.create();
    TlsChannelCredentials.Builder tls = TlsChannelCredentials.newBuilder().trustManager(new File(options.ca()));
    if (options.certificate() != null) tls.keyManager(new File(options.certificate()), new File(options.key()));
    return tls.build();
  }
}
