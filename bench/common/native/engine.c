/* A cheap engine for overhead benches: canned OpenAI answers, so that it is not what is measured.
 *
 *   engine PORT GAP_US [PHASE_US]
 *
 * A body with "stream":true is answered by as many server-sent events as its "max_tokens" says:
 * one at once, then one a tick of GAP_US for all running streams together, as an engine's
 * iterations do; the first tick is PHASE_US late. Everything else gets one small JSON answer at once. Usage tells a token
 * for each 4.5 bytes of body. GET gets 200, GET /metrics a page like vLLM's. One thread, epoll.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define MAX_FD 65536
#define DEFAULT_CHUNKS 64
#define BLOCKS 5000000L /* of 16 tokens: a KV cache that never binds */

typedef struct {
  char *in;
  size_t used, room;
  int left;   /* chunks still to send; 0 when idle */
  int slot;   /* place in running[] */
  int chunks; /* of the answer under way */
  long prompt_tokens;
} conn;

static conn *conns[MAX_FD];
static int running[MAX_FD], n_running;
static int listener, epfd;
static long gap_us, prompt_tokens_total, output_tokens_total, finished_total;
static time_t started;
static char event[512];
static size_t event_len;

static const char HEAD[] =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    "transfer-encoding: chunked\r\n\r\n";

static size_t chunked(char *out, const char *data) {
  return sprintf(out, "%zx\r\n%s\r\n", strlen(data), data);
}

static void prepare(void) {
  event_len = chunked(event,
                      "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                      "\"model\":\"bench-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" word\"},"
                      "\"logprobs\":null,\"finish_reason\":null}]}\n\n");
}

static size_t whole(char *out, long prompt_tokens) {
  char json[1024];
  int len = sprintf(json,
                    "{\"id\":\"chatcmpl-0\",\"object\":\"chat.completion\",\"created\":1,\"model\":\"bench-model\","
                    "\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"A short answer of a "
                    "few words that an engine might give to a question.\"},\"logprobs\":null,\"finish_reason\":"
                    "\"stop\"}],\"usage\":{\"prompt_tokens\":%ld,\"completion_tokens\":16,\"total_tokens\":%ld}}",
                    prompt_tokens, prompt_tokens + 16);
  return sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s",
                 len, json);
}

static size_t last(char *out, const conn *c) {
  char usage[512];
  sprintf(usage,
          "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
          "\"model\":\"bench-model\",\"choices\":[],\"usage\":{\"prompt_tokens\":%ld,"
          "\"completion_tokens\":%d,\"total_tokens\":%ld}}\n\ndata: [DONE]\n\n",
          c->prompt_tokens, c->chunks, c->prompt_tokens + c->chunks);
  size_t len = chunked(out,
                       "data: {\"id\":\"chatcmpl-0\",\"object\":\"chat.completion.chunk\",\"created\":1,"
                       "\"model\":\"bench-model\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" end\"},"
                       "\"logprobs\":null,\"finish_reason\":\"stop\"}]}\n\n");
  len += chunked(out + len, usage);
  return len + sprintf(out + len, "0\r\n\r\n");
}

/* As long as vLLM's page: most of that are histograms, here with nothing counted. */
static size_t metrics(char *out) {
  static const char *HISTOGRAMS[] = {"time_to_first_token_seconds", "inter_token_latency_seconds",
                                     "e2e_request_latency_seconds", "request_queue_time_seconds",
                                     "request_prefill_time_seconds", "request_decode_time_seconds",
                                     "request_prompt_tokens", "request_generation_tokens"};
  static const char LABELS[] = "engine=\"0\",model_name=\"bench-model\"";
  char page[65536];
  long prompt_tokens = 0;
  for (int k = 0; k < n_running; k++) prompt_tokens += conns[running[k]]->prompt_tokens;
  size_t len = sprintf(page, "process_start_time_seconds %ld\n", (long)started);
  struct { const char *name; double value; } figures[] = {
      {"num_requests_running", n_running},
      {"num_requests_waiting", 0},
      {"kv_cache_usage_perc", prompt_tokens / (16.0 * BLOCKS)},
      {"prefix_cache_queries_total", prompt_tokens_total},
      {"prefix_cache_hits_total", prompt_tokens_total / 2},
      {"num_preemptions_total", 0},
      {"prompt_tokens_total", prompt_tokens_total},
      {"generation_tokens_total", output_tokens_total},
      {"request_success_total", finished_total}};
  for (size_t i = 0; i < sizeof figures / sizeof *figures; i++)
    len += sprintf(page + len, "# TYPE vllm:%s gauge\nvllm:%s{%s} %.9g\n", figures[i].name,
                   figures[i].name, LABELS, figures[i].value);
  len += sprintf(page + len, "vllm:cache_config_info{block_size=\"16\",%s,num_gpu_blocks=\"%ld\"} 1\n",
                 LABELS, BLOCKS);
  for (size_t i = 0; i < sizeof HISTOGRAMS / sizeof *HISTOGRAMS; i++)
    for (int bucket = 1; bucket <= 24; bucket++)
      len += sprintf(page + len, "vllm:%s_bucket{%s,le=\"%d\"} 0\n", HISTOGRAMS[i], LABELS, bucket);
  return sprintf(out, "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %zu\r\n\r\n%s",
                 len, page);
}

static void drop(int fd) {
  conn *c = conns[fd];
  if (c->left) {
    int moved = running[--n_running];
    running[c->slot] = moved;
    conns[moved]->slot = c->slot;
  }
  free(c->in);
  free(c);
  conns[fd] = NULL;
  close(fd);
}

static void put(int fd, const char *data, size_t len) {
  while (len) {
    ssize_t n = send(fd, data, len, MSG_NOSIGNAL);
    if (n < 0 && errno == EAGAIN) { usleep(50); continue; }
    if (n < 0) return; /* the read side will notice */
    data += n;
    len -= n;
  }
}

static void next_chunk(int fd) {
  conn *c = conns[fd];
  if (--c->left) {
    put(fd, event, event_len);
    return;
  }
  int moved = running[--n_running];
  running[c->slot] = moved;
  conns[moved]->slot = c->slot;
  char text[2048];
  put(fd, text, last(text, c));
  output_tokens_total += c->chunks;
  finished_total++;
}

static void answer(int fd, conn *c, const char *body, size_t len) {
  static char text[131072];
  if (!strncmp(c->in, "GET /metrics", 12)) {
    put(fd, text, metrics(text));
    return;
  }
  if (!strncmp(c->in, "GET /v1/models", 14)) { /* some routers ask which model it serves */
    static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench-model\","
                                 "\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\"}]}";
    put(fd, text, sprintf(text, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                                "content-length: %zu\r\n\r\n%s", sizeof MODELS - 1, MODELS));
    return;
  }
  c->prompt_tokens = len / 4.5;
  prompt_tokens_total += c->prompt_tokens;
  int stream = memmem(body, len, "\"stream\":true", 13) || memmem(body, len, "\"stream\": true", 14);
  if (!stream) {
    put(fd, text, whole(text, c->prompt_tokens));
    if (len) { output_tokens_total += 16; finished_total++; } /* no body: a probe */
    return;
  }
  put(fd, HEAD, sizeof HEAD - 1);
  /* Some proxies rename it. */
  const char *most = memmem(body, len, "\"max_tokens\":", 13);
  if (most) most += 13;
  else if ((most = memmem(body, len, "\"max_completion_tokens\":", 24))) most += 24;
  c->left = c->chunks = most && atoi(most) > 0 ? atoi(most) : DEFAULT_CHUNKS;
  c->slot = n_running;
  running[n_running++] = fd;
  next_chunk(fd);
}

static void readable(int fd) {
  conn *c = conns[fd];
  for (;;) {
    if (c->room - c->used < 65536) c->in = realloc(c->in, c->room = c->room * 2 + 131072);
    ssize_t n = recv(fd, c->in + c->used, c->room - c->used - 1, 0);
    if (n < 0 && errno == EAGAIN) break;
    if (n <= 0) { drop(fd); return; }
    c->used += n;
  }
  while (c->used) {
    c->in[c->used] = 0;
    char *end = memmem(c->in, c->used, "\r\n\r\n", 4);
    if (!end) return;
    size_t head = end + 4 - c->in, length = 0;
    char *field = strcasestr(c->in, "\r\ncontent-length:");
    if (field && field < end) length = strtoul(field + 17, NULL, 10);
    if (c->used < head + length) return;
    answer(fd, c, c->in + head, length);
    if (!conns[fd]) return;
    c->used -= head + length;
    memmove(c->in, c->in + head + length, c->used);
  }
}

static void accept_all(void) {
  int fd, one = 1;
  while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
    if (fd >= MAX_FD) { close(fd); continue; }
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conns[fd] = calloc(1, sizeof(conn));
    struct epoll_event e = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(epfd, EPOLL_CTL_ADD, fd, &e);
  }
}

int main(int argc, char **argv) {
  if (argc < 3 || argc > 4 || (gap_us = atol(argv[2])) < 1) {
    fprintf(stderr, "usage: engine PORT GAP_US [PHASE_US]\n");
    return 2;
  }
  signal(SIGPIPE, SIG_IGN);
  started = time(NULL);
  prepare();
  int one = 1;
  listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
  setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
  struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])),
                           .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 4096)) {
    perror("engine");
    return 1;
  }
  epfd = epoll_create1(0);
  struct epoll_event e = {.events = EPOLLIN, .data.fd = listener}, events[512];
  epoll_ctl(epfd, EPOLL_CTL_ADD, listener, &e);
  int timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
  long first_us = gap_us + (argc > 3 ? atol(argv[3]) : 0);
  struct itimerspec spec = {{gap_us / 1000000, gap_us % 1000000 * 1000},
                            {first_us / 1000000, first_us % 1000000 * 1000}};
  timerfd_settime(timer, 0, &spec, NULL);
  e.data.fd = timer;
  epoll_ctl(epfd, EPOLL_CTL_ADD, timer, &e);
  for (;;) {
    int n = epoll_wait(epfd, events, 512, -1);
    for (int i = 0; i < n; i++) {
      int fd = events[i].data.fd;
      if (fd == listener) accept_all();
      else if (fd == timer) {
        unsigned long long ticks;
        if (read(timer, &ticks, 8) == 8)
          for (int k = n_running - 1; k >= 0; k--) next_chunk(running[k]);
      } else if (conns[fd]) readable(fd);
    }
  }
}
