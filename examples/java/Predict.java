import com.google.protobuf.ByteString;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.TimeUnit;
import tessera.predictor.FloatFeatures;
import tessera.predictor.FloatVec;
import tessera.predictor.PredictionRequest;
import tessera.predictor.PredictionResponse;
import tessera.predictor.PredictorGrpc;
import tessera.predictor.SparseFeatures;

/**
 * Asks a Tessera server for scores of samples that are read from standard input.
 *
 * <pre>java Predict [--strings] HOST:PORT &lt; samples.txt</pre>
 *
 * <p>A line is a sample: its dense values, then the ids of each feature in the order of the model's schema, which
 * {@code tessera inspect MODEL.pt} lists. A space stands between two features, a comma between two values of one, "-"
 * stands for none, and "nan" for a dense value that is missing:
 *
 * <pre>0.5,nan 7 8,9 -</pre>
 *
 * <p>An answer is a line for each sample and output: the sample's number, the output's name, the values. With --strings
 * the ids are sent as the texts that they are, of which the server makes the ids. docs/client.md says how to generate
 * the package tessera.predictor from protos/predictor.proto, and how to build this program.
 *
 * <p>Exit status: 0 every sample was scored; 1 the server did not score them; 2 the command or a line has to be changed.
 */
public final class Predict {
  private static final long TIMEOUT_S = 5;

  /** A line: its dense values, and the ids of each feature as they were written. */
  private record Sample(float[] dense, List<String[]> bags) {}

  /** What has to be changed before anything can be sent. */
  private static final class InputError extends Exception {
    private static final long serialVersionUID = 1;

    InputError(String message) {
      super(message);
    }
  }

  private Predict() {}

  /** The values of one feature. */
  private static String[] wordsOf(String text) {
    return text.equals("-") ? new String[0] : text.split(",");
  }

  private static Sample parseSample(String line) throws InputError {
    String[] parts = line.trim().split("\\s+");
    String[] words = wordsOf(parts[0]);
    float[] dense = new float[words.length];
    for (int i = 0; i < words.length; ++i) {
      try {
        dense[i] = words[i].equalsIgnoreCase("nan") ? Float.NaN : Float.parseFloat(words[i]);
      } catch (NumberFormatException error) {
        throw new InputError("'" + words[i] + "' is not a dense value");
      }
    }
    List<String[]> bags = new ArrayList<>();
    for (int i = 1; i < parts.length; ++i) bags.add(wordsOf(parts[i]));
    return new Sample(dense, bags);
  }

  /** Samples that have as many dense values and features as the first. */
  private static List<Sample> readSamples(BufferedReader input) throws IOException, InputError {
    List<Sample> samples = new ArrayList<>();
    int number = 0;
    for (String line = input.readLine(); line != null; line = input.readLine()) {
      ++number;
      if (line.isBlank()) continue;
      Sample read;
      try {
        read = parseSample(line);
      } catch (InputError error) {
        throw new InputError("line " + number + ": " + error.getMessage());
      }
      if (!samples.isEmpty()) {
        Sample first = samples.get(0);
        if (read.dense.length != first.dense.length || read.bags.size() != first.bags.size()) {
          throw new InputError(
              String.format(
                  "line %d has %d dense values and %d features; the first line has %d and %d",
                  number, read.dense.length, read.bags.size(), first.dense.length, first.bags.size()));
        }
      }
      samples.add(read);
    }
    if (samples.isEmpty()) throw new InputError("standard input has no samples");
    return samples;
  }

  private static ByteBuffer littleEndian(int bytes) {
    return ByteBuffer.allocate(bytes).order(ByteOrder.LITTLE_ENDIAN);
  }

  /**
   * Lays the samples out as the protocol wants them, all numbers little-endian: dense values sample by sample, lengths
   * and ids feature by feature.
   */
  private static PredictionRequest encode(List<Sample> samples, boolean asStrings) throws InputError {
    int columns = samples.get(0).dense.length;
    int features = samples.get(0).bags.size();
    ByteBuffer dense = littleEndian(4 * samples.size() * columns);
    ByteBuffer lengths = littleEndian(4 * samples.size() * features);
    int count = 0;
    for (Sample one : samples) {
      for (float value : one.dense) dense.putFloat(value);
      for (String[] bag : one.bags) count += bag.length;
    }
    ByteBuffer ids = littleEndian(asStrings ? 0 : 8 * count);
    SparseFeatures.Builder sparse = SparseFeatures.newBuilder().setNumFeatures(features);
    for (int feature = 0; feature < features; ++feature) {
      for (int number = 0; number < samples.size(); ++number) {
        String[] bag = samples.get(number).bags.get(feature);
        lengths.putInt(bag.length);
        for (String word : bag) {
          if (asStrings) {
            sparse.addValuesBytes(ByteString.copyFromUtf8(word));
            continue;
          }
          try {
            ids.putLong(Long.parseLong(word));
          } catch (NumberFormatException error) {
            throw new InputError(
                String.format(
                    "sample %d, feature %d: '%s' is not a whole number; give --strings to send texts",
                    number, feature, word));
          }
        }
      }
    }
    return PredictionRequest.newBuilder()
        .setBatchSize(samples.size())
        .setFloatFeatures(
            FloatFeatures.newBuilder().setNumFeatures(columns).setValues(ByteString.copyFrom(dense.flip())))
        .setIdListFeatures(
            sparse.setLengths(ByteString.copyFrom(lengths.flip())).setValuesInt64(ByteString.copyFrom(ids.flip())))
        .build();
  }

  /** Sends a request; round_robin shares calls between all addresses of a name such as dns:///tessera-pods:50051. */
  private static PredictionResponse predict(String address, PredictionRequest request) {
    ManagedChannel channel =
        ManagedChannelBuilder.forTarget(address).usePlaintext().defaultLoadBalancingPolicy("round_robin").build();
    try {
      return PredictorGrpc.newBlockingStub(channel)
          .withDeadlineAfter(TIMEOUT_S, TimeUnit.SECONDS)
          .predict(request);
    } finally {
      channel.shutdownNow();
    }
  }

  /** Prints the values of each sample; an output has one or several for each. */
  private static void write(PrintStream output, int samples, PredictionResponse response) {
    Map<String, FloatVec> outputs = new TreeMap<>(response.getPredictionsMap());
    StringBuilder text = new StringBuilder();
    for (int number = 0; number < samples; ++number) {
      for (Map.Entry<String, FloatVec> entry : outputs.entrySet()) {
        FloatVec values = entry.getValue();
        int width = values.getDataCount() / samples;
        text.append(number).append(' ').append(entry.getKey());
        for (int i = 0; i < width; ++i) text.append(' ').append(values.getData(number * width + i));
        text.append('\n');
      }
    }
    output.print(text);
    output.flush();
  }

  public static void main(String[] arguments) throws IOException {
    boolean asStrings = arguments.length == 2 && arguments[0].equals("--strings");
    if (arguments.length != (asStrings ? 2 : 1)) {
      System.err.println("usage: java Predict [--strings] HOST:PORT < samples.txt");
      System.exit(2);
    }
    try {
      BufferedReader input = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
      List<Sample> samples = readSamples(input);
      write(System.out, samples.size(), predict(arguments[arguments.length - 1], encode(samples, asStrings)));
    } catch (InputError error) {
      System.err.println(error.getMessage());
      System.exit(2);
    } catch (StatusRuntimeException error) {
      System.err.println(error.getStatus().getCode() + ": " + error.getStatus().getDescription());
      System.exit(1);
    }
  }
}
