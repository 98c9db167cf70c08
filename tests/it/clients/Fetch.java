import java.net.Authenticator;
import java.net.PasswordAuthentication;
import java.net.URI;
import java.net.URLDecoder;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.charset.StandardCharsets;

/** Prints the answers to a GET and a POST. */
class Fetch {
    public static void main(String[] urls) throws Exception {
        String[] proxy = URI.create(System.getenv("HTTPS_PROXY")).getRawUserInfo().split(":", 2);
        HttpClient client = HttpClient.newBuilder().authenticator(new Authenticator() {
            @Override
            protected PasswordAuthentication getPasswordAuthentication() {
                // Only for the proxy: origins shall not get it.
                if (getRequestorType() != RequestorType.PROXY) {
                    return null;
                }
                return new PasswordAuthentication(plain(proxy[0]), plain(proxy[1]).toCharArray());
            }
        }).build();
        HttpRequest get = HttpRequest.newBuilder(URI.create(urls[0])).build();
        System.out.print(client.send(get, BodyHandlers.ofString()).body());
        HttpRequest post = HttpRequest.newBuilder(URI.create(urls[1]))
            .POST(HttpRequest.BodyPublishers.ofString("x".repeat(100000))).build();
        var answer = client.send(post, BodyHandlers.ofString());
        System.out.println(answer.body() + " " + answer.version());
    }

    private static String plain(String escaped) {
        return URLDecoder.decode(escaped.replace("+", "%2B"), StandardCharsets.UTF_8);
    }
}
