import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientCall;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.internal.GrpcUtil;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientResponseObserver;
import io.grpc.stub.MetadataUtils;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;

/**
 * The interop cases of gRPC that apply, by grpc-java: java GrpcJavaCases.java ADDRESS SMALL LARGE
 *
 * <p>It needs grpc-java alone: messages are bytes. The first case that fails ends it with status 1.
 */
public final class GrpcJavaCases {
  private static final String PREDICT = "predictor.Predictor/Predict";
  private static final String REFLECT = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";
  private static final String OTHER_MODEL = "no such 100% \u03b1";
  private static final long WAIT_S = 60;

  /** Passes messages on as they are. */
  private static final class Raw implements MethodDescriptor.Marshaller<byte[]> {
    @Override
    public InputStream stream(byte[] value) {
      return new ByteArrayInputStream(value);
    }

    @Override
    public byte[] parse(InputStream stream) {
      try {
        return stream.readAllBytes();
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  }

  private interface Case {
    void run() throws Exception;
  }

  private final Channel channel;
  private final byte[] small;
  private final byte[] large;

  private GrpcJavaCases(Channel channel, byte[] small, byte[] large) {
    this.channel = channel;
    this.small = small;
    this.large = large;
  }

  private static void expect(boolean holds, Object... seen) {
    if (!holds) throw new AssertionError("not as expected: " + Arrays.deepToString(seen));
  }

  private static MethodDescriptor<byte[], byte[]> method(String path, MethodDescriptor.MethodType type) {
    return MethodDescriptor.newBuilder(new Raw(), new Raw()).setFullMethodName(path).setType(type).build();
  }

  private static CallOptions options() {
    return CallOptions.DEFAULT.withDeadlineAfter(WAIT_S, TimeUnit.SECONDS);
  }

  private static byte[] unary(Channel on, String path, byte[] content, CallOptions options) {
    return ClientCalls.blockingUnaryCall(on, method(path, MethodDescriptor.MethodType.UNARY), options, content);
  }

  private byte[] unary(String path, byte[] content) {
    return unary(channel, path, content, options());
  }

  private Status refused(String path, byte[] content) {
    try {
      unary(path, content);
      return Status.OK;
    } catch (StatusRuntimeException error) {
      return error.getStatus();
    }
  }

  private void emptyUnary() {
    byte[] answer = unary("grpc.health.v1.Health/Check", new byte[0]);
    expect(Arrays.equals(answer, new byte[] {8, 1}), answer);
  }

  private void largeUnary() {
    expect(unary(PREDICT, large).length > unary(PREDICT, small).length);
  }

  private void compressedUnary() {
    for (byte[] content : List.of(small, large)) {
      expect(unary(channel, PREDICT, content, options().withCompression("gzip")).length > 0);
    }
  }

  private void statuses() {
    byte[] name = OTHER_MODEL.getBytes(StandardCharsets.UTF_8);
    byte[] asked = Arrays.copyOf(small, small.length + 3 + name.length);
    asked[small.length] = (byte) 0xa2;
    asked[small.length + 1] = 0x06;
    asked[small.length + 2] = (byte) name.length;
    System.arraycopy(name, 0, asked, small.length + 3, name.length);
    Status other = refused(PREDICT, asked);
    expect(other.getCode() == Status.Code.NOT_FOUND && other.getDescription().contains(OTHER_MODEL), other);
    Status broken = refused(PREDICT, new byte[] {(byte) 0xff});
    expect(broken.getCode() == Status.Code.INVALID_ARGUMENT, broken);
    Status unknown = refused("no.Such/Method", small);
    expect(unknown.getCode() == Status.Code.UNIMPLEMENTED, unknown);
  }

  private void customMetadata() {
    byte[] every = new byte[256];
    for (int i = 0; i < every.length; ++i) every[i] = (byte) i;
    Metadata metadata = new Metadata();
    Metadata.Key<String> own = Metadata.Key.of("x-own", Metadata.ASCII_STRING_MARSHALLER);
    metadata.put(own, "value");
    metadata.put(own, "x".repeat(4_000));
    metadata.put(Metadata.Key.of("x-own-bin", Metadata.BINARY_BYTE_MARSHALLER), every);
    Channel on = ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(metadata));
    expect(unary(on, PREDICT, small, options()).length > 0);
  }

  /** A stream without an end passes its deadline for certain. */
  private void deadline() {
    CallOptions soon = CallOptions.DEFAULT.withDeadlineAfter(200, TimeUnit.MILLISECONDS);
    MethodDescriptor<byte[], byte[]> watch =
        method("grpc.health.v1.Health/Watch", MethodDescriptor.MethodType.SERVER_STREAMING);
    try {
      Iterator<byte[]> answers = ClientCalls.blockingServerStreamingCall(channel, watch, soon, new byte[0]);
      while (answers.hasNext()) answers.next();
      expect(false, "the watch ended by itself");
    } catch (StatusRuntimeException error) {
      expect(error.getStatus().getCode() == Status.Code.DEADLINE_EXCEEDED, error);
    }
    expect(unary(PREDICT, small).length > 0);
  }

  private Future<byte[]> started(byte[] content) {
    ClientCall<byte[], byte[]> call =
        channel.newCall(method(PREDICT, MethodDescriptor.MethodType.UNARY), options());
    return ClientCalls.futureUnaryCall(call, content);
  }

  private void cancelled() {
    for (int i = 0; i < 20; ++i) {
      Future<byte[]> call = started(large);
      expect(call.cancel(true) || call.isDone());
    }
    expect(unary(PREDICT, small).length > 0);
  }

  private void manyAtOnce() throws Exception {
    List<Future<byte[]>> calls = new ArrayList<>();
    for (int i = 0; i < 500; ++i) calls.add(started(small));
    for (Future<byte[]> call : calls) expect(call.get(WAIT_S, TimeUnit.SECONDS).length > 0);
  }

  /** Both sides in turn, then the client's end. */
  private void streams() throws Exception {
    CompletableFuture<Integer> answers = new CompletableFuture<>();
    byte[] list = {0x3a, 0};
    ClientResponseObserver<byte[], byte[]> observer =
        new ClientResponseObserver<>() {
          private ClientCallStreamObserver<byte[]> questions;
          private int count;

          @Override
          public void beforeStart(ClientCallStreamObserver<byte[]> stream) {
            questions = stream;
          }

          @Override
          public void onNext(byte[] answer) {
            expect(new String(answer, StandardCharsets.ISO_8859_1).contains("predictor.Predictor"), answer);
            if (++count < 3) questions.onNext(list);
            else questions.onCompleted();
          }

          @Override
          public void onError(Throwable error) {
            answers.completeExceptionally(error);
          }

          @Override
          public void onCompleted() {
            answers.complete(count);
          }
        };
    ClientCall<byte[], byte[]> call =
        channel.newCall(method(REFLECT, MethodDescriptor.MethodType.BIDI_STREAMING), options());
    ClientCalls.asyncBidiStreamingCall(call, observer).onNext(list);
    expect(answers.get(WAIT_S, TimeUnit.SECONDS) == 3, answers);
  }

  private List<Case> cases() {
    return List.of(
        this::emptyUnary,
        this::largeUnary,
        this::compressedUnary,
        this::statuses,
        this::customMetadata,
        this::deadline,
        this::cancelled,
        this::manyAtOnce,
        this::streams);
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    byte[] small = Files.readAllBytes(Path.of(arguments[1]));
    byte[] large = Files.readAllBytes(Path.of(arguments[2]));
    List<Case> cases = new GrpcJavaCases(channel, small, large).cases();
    for (Case one : cases) one.run();
    channel.shutdownNow().awaitTermination(WAIT_S, TimeUnit.SECONDS);
    String version = GrpcUtil.getGrpcBuildVersion().getImplementationVersion();
    System.out.printf("grpc-java %s: %d cases%n", version, cases.size());
  }
}
