import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.file.Path;
import java.time.Duration;
import java.util.stream.Collectors;

/** Sends each request with the default HttpClient, which offers HTTP/2, and with one of HTTP/1.1; prints a line of JSON for each feature. */
public class Ask {
    static String url;
    static String key;

    interface Feature {
        String text(HttpClient client) throws Exception;
    }

    public static void main(String[] given) throws Exception {
        url = given[0];
        key = given[1];
        String asked = "{\"model\":\"assistant\",\"temperature\":0,\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]";
        for (HttpClient.Version version : HttpClient.Version.values()) {
            HttpClient client = HttpClient.newBuilder().version(version).connectTimeout(Duration.ofSeconds(5)).build();
            tell("chat: " + version, client, given[2], it -> send(it, "/v1/chat/completions", json(asked + "}"), "application/json"));
            tell("chat: again, " + version, client, given[2], it -> send(it, "/v1/chat/completions", json(asked + "}"), "application/json"));
            tell("stream: " + version, client, "[DONE]", it -> lines(it, asked + ",\"stream\":true}"));
            tell("audio: " + version, client, given[4], it -> send(it, "/v1/audio/transcriptions", form(Path.of(given[3])), "multipart/form-data; boundary=edge"));
        }
    }

    static void tell(String feature, HttpClient client, String wanted, Feature feat) {
        String found;
        try {
            found = feat.text(client);
        } catch (Exception error) {
            found = error.toString();
        }
        boolean ok = found.contains(wanted);
        String detail = (ok ? wanted : found).replaceAll("[^ -~]", " ").replace("\\", "").replace("\"", "'");
        System.out.println("{\"feature\": \"" + feature + "\", \"ok\": " + ok + ", \"detail\": \"" + detail + "\"}");
    }

    static BodyPublisher json(String text) {
        return BodyPublishers.ofString(text);
    }

    static BodyPublisher form(Path file) throws Exception {
        String head = "--edge\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nspeech\r\n--edge\r\n"
            + "Content-Disposition: form-data; name=\"file\"; filename=\"sample.flac\"\r\n\r\n";
        return BodyPublishers.concat(BodyPublishers.ofString(head), BodyPublishers.ofFile(file), BodyPublishers.ofString("\r\n--edge--\r\n"));
    }

    static HttpRequest post(String path, BodyPublisher body, String type) {
        return HttpRequest.newBuilder(URI.create(url + path)).timeout(Duration.ofSeconds(60))
            .header("Content-Type", type).header("Authorization", "Bearer " + key).POST(body).build();
    }

    static String send(HttpClient client, String path, BodyPublisher body, String type) throws Exception {
        HttpResponse<String> reply = client.send(post(path, body, type), BodyHandlers.ofString());
        return reply.statusCode() == 200 ? reply.body() : reply.statusCode() + " " + reply.body();
    }

    static String lines(HttpClient client, String body) throws Exception {
        return client.send(post("/v1/chat/completions", json(body), "application/json"), BodyHandlers.ofLines())
            .body().collect(Collectors.joining(" "));
    }
}
