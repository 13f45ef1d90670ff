// Calls FusedBatchNormGradV3 on random tensors and compares the result with the formula in double precision.
//
//   java Example localhost:50051          sends a small batch
//   java Example localhost:50051 2048     sends a batch of 2048 images
//   java Example localhost:50051 --bad    sends a scale of the wrong length
//   java Example gpu1.example:50051 --ca ca.pem --token-file alice.token
import bngrad.v1.Tensor;
import google.rpc.BadRequestOuterClass.BadRequest.FieldViolation;
import io.grpc.StatusRuntimeException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.Set;

public final class Example {
  private static final int HEIGHT = 8, WIDTH = 8, CHANNELS = 16;
  private static final float EPSILON = 1e-3f;
  private static final int MAX_BATCH = 100000;
  private static final Set<String> PATHS = Set.of("--ca", "--certificate", "--key", "--token-file");
  private static final Random RANDOM = new Random(0);

  private record Inputs(float[] yBackprop, float[] x, float[] scale, float[] mean, float[] variance) {}

  private record Expected(double[] xBackprop, double[] scaleBackprop, double[] offsetBackprop) {}

  private static float[] uniform(int size, float low, float high) {
    float[] values = new float[size];
    for (int i = 0; i < size; i++) values[i] = low + (high - low) * RANDOM.nextFloat();
    return values;
  }

  private static Inputs randomInputs(int batch) {
    int size = batch * HEIGHT * WIDTH * CHANNELS;
    float[] x = uniform(size, -1, 1), mean = new float[CHANNELS], variance = new float[CHANNELS];
    double[] sum = new double[CHANNELS], sumOfSquares = new double[CHANNELS];
    for (int i = 0; i < size; i++) {
      sum[i % CHANNELS] += x[i];
      sumOfSquares[i % CHANNELS] += (double) x[i] * x[i];
    }
    double m = (double) size / CHANNELS;
    for (int c = 0; c < CHANNELS; c++) {
      mean[c] = (float) (sum[c] / m);
      variance[c] = (float) (sumOfSquares[c] / m - sum[c] / m * sum[c] / m);
    }
    return new Inputs(uniform(size, -1, 1), x, uniform(CHANNELS, 0.5f, 1.5f), mean, variance);
  }

  private static Expected expected(Inputs in) {
    int size = in.x.length;
    double m = (double) size / CHANNELS;
    double[] rstd = new double[CHANNELS], sumDy = new double[CHANNELS], sumDyXc = new double[CHANNELS];
    for (int i = 0; i < size; i++) {
      int c = i % CHANNELS;
      sumDy[c] += in.yBackprop[i];
      sumDyXc[c] += in.yBackprop[i] * ((double) in.x[i] - in.mean[c]);
    }
    double[] xBackprop = new double[size], scaleBackprop = new double[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) {
      rstd[c] = 1 / Math.sqrt((double) in.variance[c] + EPSILON);
      scaleBackprop[c] = rstd[c] * sumDyXc[c];
    }
    for (int i = 0; i < size; i++) {
      int c = i % CHANNELS;
      double xc = (double) in.x[i] - in.mean[c];
      xBackprop[i] = in.scale[c] * rstd[c]
          * (in.yBackprop[i] - sumDy[c] / m - xc * rstd[c] * rstd[c] * sumDyXc[c] / m);
    }
    return new Expected(xBackprop, scaleBackprop, sumDy);
  }

  private static boolean matches(String name, Tensor tensor, double[] expected, double tolerance) {
    float[] values = BngradClient.values(tensor);
    if (values.length != expected.length) throw new IllegalStateException(name + " has a wrong size");
    double error = 0, largest = 0;
    for (int i = 0; i < expected.length; i++) {
      error = Math.max(error, Math.abs(values[i] - expected[i]));
      largest = Math.max(largest, Math.abs(expected[i]));
    }
    String shape = tensor.getShapeList().toString().replace('[', '(').replace(']', ')');
    System.out.printf("%s %s: largest error %.2e of the largest value%n", name, shape, error / largest);
    return error <= tolerance * largest;
  }

  private static void exitWithUsage() {
    System.err.println("usage: Example TARGET [BATCH] [--bad] [--ca FILE] [--certificate FILE --key FILE] [--token-file FILE]");
    System.err.println("BATCH is a whole number from 1 to " + MAX_BATCH);
    System.exit(2);
  }

  /** Returns 0 for a word that is no batch. */
  private static int parseBatch(String word) {
    int batch = word.matches("[0-9]{1,9}") ? Integer.parseInt(word) : 0;
    return batch <= MAX_BATCH ? batch : 0;
  }

  public static void main(String[] arguments) throws Exception {
    Map<String, String> options = new HashMap<>();
    List<String> words = new ArrayList<>();
    ArrayDeque<String> rest = new ArrayDeque<>(Arrays.asList(arguments));
    while (!rest.isEmpty()) {
      String word = rest.remove();
      if (word.equals("--bad")) options.put(word, "");
      else if (PATHS.contains(word) && !rest.isEmpty()) options.put(word, rest.remove());
      else if (word.startsWith("-")) exitWithUsage();
      else words.add(word);
    }
    if (words.isEmpty() || words.size() > 2) exitWithUsage();
    int batch = words.size() > 1 ? parseBatch(words.get(1)) : 2;
    if (batch == 0) exitWithUsage();
    BngradClient.Options paths = new BngradClient.Options(
        options.get("--ca"), options.get("--certificate"), options.get("--key"), options.get("--token-file"));

    Inputs in = randomInputs(batch);
    long[] shape = {batch, HEIGHT, WIDTH, CHANNELS};
    float[] scale = Arrays.copyOf(in.scale, options.containsKey("--bad") ? CHANNELS - 1 : CHANNELS);
    boolean good;
    try (BngradClient client = new BngradClient(words.get(0), paths)) {
      BngradClient.Gradients gradients = client.fusedBatchNormGradV3(
          BngradClient.tensor(in.yBackprop, shape), BngradClient.tensor(in.x, shape),
          BngradClient.tensor(scale, scale.length), BngradClient.tensor(in.mean, CHANNELS),
          BngradClient.tensor(in.variance, CHANNELS), BngradClient.epsilon(EPSILON));
      Expected expected = expected(in);
      good = matches("x_backprop", gradients.xBackprop(), expected.xBackprop, 2.4e-7)
          & matches("scale_backprop", gradients.scaleBackprop(), expected.scaleBackprop, 1e-6)
          & matches("offset_backprop", gradients.offsetBackprop(), expected.offsetBackprop, 1e-6);
    } catch (StatusRuntimeException error) {
      System.err.printf("%s: %s%n", error.getStatus().getCode(), error.getStatus().getDescription());
      if (error.getCause() != null) System.err.println(error.getCause().getMessage());
      for (FieldViolation violation : BngradClient.violations(error)) {
        System.err.printf("field %s: %s%n", violation.getField(), violation.getDescription());
      }
      good = false;
    }
    System.exit(good ? 0 : 1);
  }
}
